"""Keys of a configuration: rules, TOML values, and values such as ``adam(eps = 1e-6)``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from hybrid.errors import ConfigError

# A dotted key of many segments: tomllib needs memory in proportion to the square of their number.
_DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")
USER_FUNCTION = r"\w+(\.\w+)*:\w+"  # user code, as module:function
BUILT_IN = "[^:]*"  # any other value of a key that also takes a USER_FUNCTION
_KINDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
MAX_LAYERS = 1000  # limit for a net; the construction of a far larger net takes minutes before it fails
_LISTS: dict[Any, str] = {
    int: f"a list of at most {MAX_LAYERS} integers",
    float: "a list of finite numbers",
    str: "a list of text",
}
_CALL = re.compile(r"\s*([\w.:]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_NAMED_ARGUMENT = re.compile(r"\s*\w+\s*=")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text; ValueError if invalid, RecursionError if nesting or a dotted key is too deep."""
    if _DEEP_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def key_lines(text: str) -> dict[str, int]:
    """Map dotted keys and sections of valid TOML to line numbers; keys of inline tables may be missing."""
    lines: dict[str, int] = {}
    section: list[str] = []
    first, statement = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        is_within_list = bool(statement) and line.rstrip().endswith(",")
        statement += f"{line}\n"
        if is_within_list:
            continue
        try:
            inner = parse_toml(statement)
        except ValueError:
            continue  # the value continues on the next line
        names: list[str] = []
        while isinstance(inner, dict) and len(inner) == 1:
            ((name, inner),) = inner.items()
            names.append(name)
        if statement.lstrip().startswith("["):
            section = dotted = names
        else:
            dotted = [*section, *names]
        for end in range(1, len(dotted) + 1):
            lines.setdefault(".".join(dotted[:end]), first)
        first, statement = number + 1, ""
    return lines


def toml_value(value: Any) -> str:
    """Write a value as TOML: a string, a finite number, a boolean, or a list or tuple of these."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(element) for element in value)}]"
    # Strings, numbers and booleans of JSON are valid TOML, except that TOML requires an escaped DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def option(default: Any, meaning: str, **more: Any) -> Any:
    """Return the dataclass field that declares a key; ``more`` sets attributes of :class:`Key`."""
    return field(default=default, metadata={"meaning": meaning, **more})


fixed = partial(option, is_fixed=True)
by_host = partial(option, is_by_host=True)
# Declares keys of the model, its columns, and the arithmetic of training, which need no signature.
setting = partial(option, unsigned=r"(?s:.*)")
model = partial(fixed, unsigned=r"(?s:.*)")
in_files = partial(model, takes_numbers=True)  # for names and values in files


@dataclass(frozen=True)
class Key:
    """A key of a section, or an argument such as ``eps`` in ``adam(eps = 1e-6)``."""

    name: str
    kind: Any  # type of the value, or of the elements of a list
    is_list: bool
    default: Any
    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    size: int | None = None  # the length of a list, if it is fixed
    signatures: CallSignatures | None = None  # the names that a value may have, with their arguments
    takes_numbers: bool = False  # a text may be written as a number, true or false
    is_fixed: bool = False  # a resumed run keeps its value, because tensors or the data position depend on it
    is_name_fixed: bool = False  # a resumed run keeps the name in its value, but may change the arguments
    unsigned: str = ""  # pattern of the values that need no signature; see hybrid.user_code.run_signature
    is_by_host: bool = False  # roles may have different values; otherwise, the master's value applies
    prepares: bool = True  # prepared data depend on it; for [data], [tasks.NAME] and [columns.NAME]
    absent: str = ""  # meaning of the default None; if empty, None means the value of the overridden section

    @property
    def rule(self) -> str:
        """A text that describes valid values, for example ``an integer, at least 1``."""
        if self.signatures is not None:
            return self.signatures.rule
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = _LISTS[self.kind] if self.is_list else _KINDS[self.kind]
        kind = f"{kind} or numbers" if self.takes_numbers and self.is_list else kind
        if self.size is not None:
            kind = f"{kind} of length {self.size}"
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (("above", self.above), ("at least", self.minimum), ("at most", self.maximum))
            if bound is not None
        ]
        return ", ".join([kind, *bounds])

    def convert(self, value: Any) -> Any:
        """Convert a value from TOML. A value of a wrong type stays unchanged, and :meth:`check` rejects it.

        For a list key, a list becomes a tuple, and a single value becomes a tuple of length 1. But without
        ``signatures``, a text with a comma stays a text, since the user may have meant a list. For a float
        key, an integer becomes a float. With ``takes_numbers``, numbers and booleans become text. A valid
        name with arguments gets its canonical spelling, except in a list.
        """
        if self.signatures is not None and isinstance(value, str) and not self.is_list:
            with contextlib.suppress(ConfigError):  # check() raises it, with the name of the key
                return self.signatures.normalize(value)
        if self.is_list and isinstance(value, list):
            return tuple(self._convert_element(element) for element in value)
        value = self._convert_element(value)
        has_items = "," in str(value) and self.signatures is None  # arguments have commas, too
        is_single = self.is_list and type(value) is self.kind and not has_items
        return (value,) if is_single else value

    def _convert_element(self, value: Any) -> Any:
        if self.takes_numbers and isinstance(value, bool | int | float):
            return str(value).lower()  # TOML's true is Python's True
        is_whole = self.kind is float and type(value) is int and abs(value) <= sys.float_info.max
        return float(value) if is_whole else value

    def parse(self, text: str) -> Any:
        """Parse a value of ``--set`` as TOML; return ``text`` if it is not TOML, or the key needs text."""
        try:
            document = parse_toml(f"value = {text}")
        except (ValueError, RecursionError):
            return text
        value = document.pop("value")
        is_toml = not document and (self.kind is not str or isinstance(value, str | list))
        return value if is_toml else text

    def parse_unnamed(self, text: str) -> Any:
        """Parse an argument without a name, as in ``hash(1000)``. Quotes or brackets may be missing."""
        text = text.strip()
        value = self.parse(f"[{text}]" if self.is_list and text[:1] != "[" else text)
        return self.convert(value if isinstance(value, list) or not self.is_list else text)

    def check(self, dotted: str, value: Any) -> None:
        """Raise ConfigError, which names the key as ``dotted``, if ``value`` breaks the rule of this key."""
        if not self.accepts(value):
            raise ConfigError(dotted, f"must be {self.rule}", value)
        if self.signatures is not None:
            for each in value if self.is_list else (value,):
                self.signatures.parse(dotted, each)

    def accepts(self, value: Any) -> bool:
        """Return whether a value has the type, limits and choices of the key; do not check ``signatures``."""
        elements = value if self.is_list else (value,)
        return (
            isinstance(elements, tuple)
            and (self.size is None or len(elements) == self.size)
            and not (self.kind is int and len(elements) > MAX_LAYERS)
            and all(self._accepts_element(element) for element in elements)
        )

    def _accepts_element(self, value: Any) -> bool:
        types = (float, int) if self.kind is float else (self.kind,)
        if type(value) not in types:  # type(), since a bool is an instance of int
            return False
        if self.kind not in (int, float):
            return not self.choices or value in self.choices
        return (
            abs(value) <= sys.float_info.max  # False for NaN and infinity
            and (self.above is None or value > self.above)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
        )


def keys_of(section: Any) -> dict[str, Key]:
    """Return the keys of a section by name; a section is a dataclass with fields of :func:`option`."""
    hints, keys = get_type_hints(section), {}
    for declared in dataclasses.fields(section):
        name, hint = declared.name, hints[declared.name]
        kind = get_args(hint)[0] if get_args(hint) else hint  # tuple[T, ...] and T | None
        keys[name] = Key(name, kind, get_origin(hint) is tuple, declared.default, **declared.metadata)
    return keys


def argument(name: str, kind: Any, default: Any, *, is_list: bool = False, **rule: Any) -> Key:
    """Declare an argument of ``NAME(...)``, required if ``default`` is None. ``rule`` sets fields of Key."""
    return Key(name, kind, is_list, default, "", **rule)


def split_call(dotted: str, text: str) -> tuple[str, tuple[str, ...]]:
    """Split "NAME(a = 1)" into the name, and the arguments as lines of TOML; ConfigError if invalid."""
    match = _CALL.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        arguments = _parse_arguments(match[2] or "")
        lines = tuple(f"{name} = {toml_value(value)}" for name, value in arguments.items())
        parse_toml("\n".join(lines))  # JSON of a table or of infinity is not TOML
        return match[1], lines
    except (TypeError, ValueError, RecursionError) as error:  # a TypeError for a date
        raise ConfigError(dotted, 'must be like "Name(argument = 0.9, other = [1, 2])"', text) from error


def _parse_arguments(text: str) -> dict[str, Any]:
    ((_, arguments),) = parse_toml(f"arguments = {{{text}}}").items()  # ValueError if the text has more keys
    return dict(arguments)


@dataclass(frozen=True)
class Call:
    """A parsed ``NAME(...)``: the name, and the values of all arguments, defaults included."""

    name: str
    arguments: Mapping[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]


class CallSignatures:
    """The names that a key accepts, each with the arguments that may follow it in parentheses.

    Arguments are named, as in ``adam(eps = 1e-6)``. The first may be given without its name.

    Args:
        arguments: the arguments of each name. An argument whose default is None is required.
        others: a regular expression. Values that match it are valid, too, without arguments.
        others_rule: a description of ``others``.
    """

    def __init__(
        self, arguments: Mapping[str, Sequence[Key]], *, others: str = r"(?!)", others_rule: str = ""
    ) -> None:
        self._keys = {name: {key.name: key for key in keys} for name, keys in arguments.items()}
        self._others, self._others_rule = re.compile(others), others_rule

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._keys,)

    @property
    def rule(self) -> str:
        """The names as text, such as ``one of step, cosine``; if there is only one, with its arguments."""
        return self._one_of(self._keys) if len(self._keys) > 1 else self.forms

    @property
    def forms(self) -> str:
        """The names and their arguments, for example ``one of step(every = 1000), cosine``."""
        return self._one_of(map(self._form, self._keys))

    @functools.lru_cache(maxsize=1024)  # noqa: B019 (signatures are module constants)
    def parse(self, dotted: str, text: str) -> Call:
        """Parse ``text``, such as ``adam(eps = 1e-6)``; ConfigError, which names ``dotted``, if invalid."""
        match = _CALL.fullmatch(text)
        name, inner = match.groups() if match else ("", None)
        if name not in self._keys:
            if inner is None and self._others.fullmatch(text):
                return Call(text, {})
            raise ConfigError(dotted, f"must be {self.rule}", text)
        keys = self._keys[name]
        given = self._read_arguments(dotted, text, name, inner or "")
        for key in keys.values():
            value = given.get(key.name, key.default)
            if value is None:
                raise ConfigError(dotted, f"must name its {key.name}: {self._form(name)}", text)
            if key.name in given and not key.accepts(value):
                raise ConfigError(dotted, f"{key.name} must be {key.rule}", text)
            if key.name in given and key.is_list and not value:
                raise ConfigError(dotted, f"{key.name} must not be empty", text)
        return Call(name, {key.name: given.get(key.name, key.default) for key in keys.values()})

    def property_of(self, dotted: str) -> Call:
        """Return a property that parses the key ``dotted``; annotated as Call, the type of the value."""
        name = dotted.rpartition(".")[2]
        return property(lambda section: self.parse(dotted, getattr(section, name)))  # type: ignore[return-value]

    def normalize(self, text: str) -> str:
        """Return the canonical spelling of ``text``, without default arguments; ConfigError if invalid."""
        call = self.parse("", text)
        keys = self._keys.get(call.name, {})
        given = {name: value for name, value in call.arguments.items() if value != keys[name].default}
        arguments = [f"{name} = {toml_value(value)}" for name, value in given.items()]
        # A single argument is written without its name, unless a bare true or false would be unclear.
        if given and [key.kind is bool for key in keys.values()] == [False]:
            arguments = [toml_value(*given.values()).strip("[]")]
        return f"{call.name}({', '.join(arguments)})" if given else call.name

    def _read_arguments(self, dotted: str, text: str, name: str, inner: str) -> dict[str, Any]:
        keys = self._keys[name]
        if not inner.strip():
            return {}
        if not keys:
            raise ConfigError(dotted, "takes no arguments", text)
        unnamed: dict[str, Any] = {}
        if not _NAMED_ARGUMENT.match(inner):
            first = next(iter(keys.values()))
            value, *named = re.split(rf",(?=\s*(?:{'|'.join(keys)})\s*=)", inner, maxsplit=1)
            inner = "".join(named)
            unnamed[first.name] = first.parse_unnamed(value)
        try:
            given = _parse_arguments(inner)
        except (ValueError, RecursionError) as error:
            raise ConfigError(dotted, f"must hold arguments as TOML: {self._form(name)}", text) from error
        if not given.keys() <= keys.keys() - unnamed.keys():
            raise ConfigError(dotted, f"takes the arguments {', '.join(keys)}", text)
        return unnamed | {argument: keys[argument].convert(value) for argument, value in given.items()}

    def _one_of(self, names: Iterable[str]) -> str:
        one_of = "one of " if len(self._keys) > 1 else ""
        return f"{one_of}{', '.join(names)}{f', or {self._others_rule}' if self._others_rule else ''}"

    def _form(self, name: str) -> str:
        arguments = [
            key.name if key.default is None else f"{key.name} = {toml_value(key.default)}"
            for key in self._keys[name].values()
        ]
        return f"{name}({', '.join(arguments)})" if arguments else name
