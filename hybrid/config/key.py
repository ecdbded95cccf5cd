"""Keys of a configuration: their rules, and their values in TOML and as names with arguments."""

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

# A key of many segments. The memory of the parser grows with the square of their number.
_DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")
USER_FUNCTION = r"\w+(\.\w+)*:\w+"  # user code, as module:function
_KINDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
_LISTS: dict[Any, str] = {int: "a list of integers", float: "a list of finite numbers", str: "a list of text"}
_FORM = re.compile(r"\s*([\w.:]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_NAMED = re.compile(r"\s*\w+\s*=")


def parse_toml(text: str) -> dict[str, Any]:
    """The document of a TOML text.

    Raises:
        ValueError: it is not valid.
        RecursionError: it is nested too deeply.
    """
    if _DEEP_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def toml_value(value: Any) -> str:
    """The TOML text of a value."""
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(element) for element in value)}]"
    # JSON's strings, numbers and booleans are TOML's, except DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def option(default: Any, meaning: str, **more: Any) -> Any:
    """Declare a key as a field of a section; ``more`` sets attributes of :class:`Key`."""
    return field(default=default, metadata={"meaning": meaning, **more})


fixed = partial(option, is_fixed=True)
by_host = partial(option, is_by_host=True)


@dataclass(frozen=True)
class Key:
    """One key of a section.

    Attributes:
        is_fixed: whether a resumed run must keep its value, on which tensors or the data position depend.
        is_name_fixed: whether a resumed run must keep the name in its value, but may change the arguments.
        is_by_host: whether a role may have a value of its own. The master decides all other keys.
        prepares: whether prepared data depend on it. This concerns [data], [tasks.NAME] and [columns.NAME].
        absent: what None means, if not the value of the parent section.
        size: the length of a list, if it is fixed.
        signatures: the names that a value may have, with their arguments.
    """

    name: str
    kind: Any
    is_list: bool
    default: Any
    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    size: int | None = None
    signatures: CallSignatures | None = None
    is_fixed: bool = False
    is_name_fixed: bool = False
    is_by_host: bool = False
    prepares: bool = True
    absent: str = ""

    @classmethod
    def of(cls, of: dataclasses.Field[Any], hint: Any) -> Key:
        """The key that a field of a section declares."""
        is_list = get_origin(hint) is tuple
        kind = get_args(hint)[0] if get_args(hint) else hint  # tuple[T, ...] and T | None
        return cls(of.name, kind, is_list, of.default, **of.metadata)

    @property
    def rule(self) -> str:
        """The rule for values in words, for example ``an integer, at least 1``."""
        if self.signatures is not None:
            return self.signatures.rule
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = _LISTS[self.kind] if self.is_list else _KINDS[self.kind]
        if self.size is not None:
            kind = f"{kind} of length {self.size}"
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (("above", self.above), ("at least", self.minimum), ("at most", self.maximum))
            if bound is not None
        ]
        return ", ".join([kind, *bounds])

    def read(self, value: Any) -> Any:
        """Convert a TOML value to the type of this key: lists to tuples, and integers to floats."""
        if self.signatures is not None and isinstance(value, str):
            with contextlib.suppress(ConfigError):  # which check() raises with the name of the key
                return self.signatures.normalize("", value)
        if self.is_list and isinstance(value, list):
            return tuple(self._of_kind(element) for element in value)
        value = self._of_kind(value)
        is_lone = self.is_list and type(value) is self.kind and "," not in str(value)
        return (value,) if is_lone else value

    def _of_kind(self, value: Any) -> Any:
        is_whole = self.kind is float and type(value) is int and abs(value) <= sys.float_info.max
        return float(value) if is_whole else value

    def parse(self, text: str) -> Any:
        """The value of a ``--set``: TOML, or the text itself."""
        try:
            document = parse_toml(f"value = {text}")
        except (ValueError, RecursionError):
            return text
        value = document.pop("value")
        is_toml = not document and (self.kind is not str or isinstance(value, str | list))
        return value if is_toml else text

    def check(self, dotted: str, value: Any) -> None:
        """Raise ConfigError if ``value`` breaks the rule of this key."""
        if self.signatures is not None and isinstance(value, str):
            self.signatures.parse(dotted, value)
            return
        if not self.accepts(value):
            raise ConfigError(dotted, f"must be {self.rule}", value)

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` is of the type of this key, and within its limits."""
        elements = value if self.is_list else (value,)
        return (
            isinstance(elements, tuple)
            and (self.size is None or len(elements) == self.size)
            and all(self._accepts(element) for element in elements)
        )

    def _accepts(self, value: Any) -> bool:
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
    """The keys of a section by name. The section is a dataclass whose fields :func:`option` declares."""
    hints = get_type_hints(section)
    return {field.name: Key.of(field, hints[field.name]) for field in dataclasses.fields(section)}


def argument(name: str, kind: Any, default: Any, *, is_list: bool = False, **rule: Any) -> Key:
    """Declare an argument; ``rule`` sets limits as of :class:`Key`. Without a default it is required."""
    return Key(name, kind, is_list, default, "", **rule)


def split_call(dotted: str, text: str) -> tuple[str, tuple[str, ...]]:
    """The name in ``text``, a value of the key ``dotted``, and its arguments, each as a line of TOML."""
    match = _FORM.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        arguments = parse_toml(f"arguments = {{{match[2] or ''}}}")
        ((_, values),) = arguments.items()
    except (ValueError, RecursionError) as error:
        raise ConfigError(dotted, 'must be like "Name(argument = 0.9, other = [1, 2])"', text) from error
    listed = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return match[1], tuple(f"{name} = {toml_value(value)}" for name, value in listed.items())


@dataclass(frozen=True)
class Call:
    """A name and its arguments; arguments that the text leaves out have their defaults."""

    name: str
    arguments: Mapping[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]


class CallSignatures:
    """The names that a key accepts, each with the arguments that may follow it in parentheses.

    Arguments are named, as in ``adam(eps = 1e-6)``. The first may be given without its name.

    Args:
        arguments: the arguments of each name. An argument whose default is None is required.
        others: a pattern of other names that are accepted, without arguments.
        others_rule: a description of ``others``.
        hint: what the message about an unknown name adds.
    """

    def __init__(
        self,
        arguments: Mapping[str, Sequence[Key]],
        *,
        others: str = r"(?!)",
        others_rule: str = "",
        hint: str = "",
    ) -> None:
        self._arguments = arguments
        self._others = re.compile(others)
        self._others_rule = others_rule
        self._hint = hint

    @property
    def names(self) -> tuple[str, ...]:
        """The names, without those of the pattern."""
        return (*self._arguments,)

    @property
    def argument_names(self) -> set[str]:
        """The arguments of all names."""
        return {key.name for keys in self._arguments.values() for key in keys}

    def example(self, argument: str) -> str:
        """A value with ``argument``, such as ``adam(eps = 1e-08)``."""
        pairs = ((name, key) for name, keys in self._arguments.items() for key in keys)
        name, key = next(pair for pair in pairs if pair[1].name == argument)
        return f"{name}({argument} = {toml_value(key.default)})"

    @property
    def rule(self) -> str:
        """The names in words, for example ``one of step, cosine``."""
        return self._one_of(self._arguments)

    @property
    def forms(self) -> str:
        """The names and their arguments, for example ``one of step(every = 1000), cosine``."""
        return self._one_of(map(self._form, self._arguments))

    def _one_of(self, names: Iterable[str]) -> str:
        return f"one of {', '.join(names)}{f', or {self._others_rule}' if self._others_rule else ''}"

    @functools.lru_cache(maxsize=1024)  # noqa: B019 (signatures are module constants)
    def parse(self, dotted: str, text: str) -> Call:
        """The name and arguments of ``text``, a value of the key ``dotted``.

        Raises:
            ConfigError: ``text`` is not one of these names, or an argument breaks its rule.
        """
        match = _FORM.fullmatch(text)
        name, inner = match.groups() if match else ("", None)
        if name not in self._arguments:
            if inner is None and self._others.fullmatch(text):
                return Call(text, {})
            raise ConfigError(dotted, f"must be {self.rule}{f'; {self._hint}' if self._hint else ''}", text)
        keys = {key.name: key for key in self._arguments[name]}
        given = self._read(dotted, text, inner or "", keys)
        for key in keys.values():
            if key.name in given and not key.accepts(given[key.name]):
                raise ConfigError(dotted, f"{key.name} must be {key.rule}", text)
            if key.name in given and not given[key.name] and key.kind is not bool and key.is_list:
                raise ConfigError(dotted, f"{key.name} must not be empty", text)
            if given.get(key.name, key.default) is None:
                raise ConfigError(dotted, f"must name its {key.name}: {self._form(name)}", text)
        return Call(name, {key.name: given.get(key.name, key.default) for key in keys.values()})

    def normalize(self, dotted: str, text: str) -> str:
        """``text`` with the arguments that differ from their defaults only, spelled in one way."""
        call = self.parse(dotted, text)
        return self.text(call.name, call.arguments)

    def text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The value with this name and these arguments, without those that the name does not take."""
        keys = self._arguments.get(name, ())
        values = {key: key.read(arguments[key.name]) for key in keys if key.name in arguments}
        given = {key: value for key, value in values.items() if value != key.default}
        if not given:
            return name
        if len(keys) == 1 and keys[0].kind is not bool:
            (value,) = given.values()
            return f"{name}({toml_value(value).strip('[]') if keys[0].is_list else toml_value(value)})"
        return f"{name}({', '.join(f'{key.name} = {toml_value(value)}' for key, value in given.items())})"

    def _read(self, dotted: str, text: str, inner: str, keys: Mapping[str, Key]) -> dict[str, Any]:
        """The arguments within the parentheses of ``text``."""
        if not inner.strip():
            return {}
        if not keys:
            raise ConfigError(dotted, "takes no arguments", text)
        first = next(iter(keys.values()))
        if not _NAMED.match(inner):
            return {first.name: first.read(first.parse(f"[{inner}]" if first.is_list else inner.strip()))}
        try:
            document = parse_toml(f"arguments = {{{inner}}}")
        except (ValueError, RecursionError) as error:
            raise ConfigError(dotted, f"must hold arguments as TOML: {self._form_of(keys)}", text) from error
        given = document.pop("arguments")
        if document or not given.keys() <= keys.keys():
            raise ConfigError(dotted, f"takes the arguments {', '.join(keys)}", text)
        return {name: keys[name].read(value) for name, value in given.items()}

    def _form(self, name: str) -> str:
        keys = {key.name: key for key in self._arguments[name]}
        return f"{name}({self._form_of(keys)})" if keys else name

    def _form_of(self, keys: Mapping[str, Key]) -> str:
        defaults = ("" if key.default is None else f" = {toml_value(key.default)}" for key in keys.values())
        return ", ".join(f"{name}{default}" for name, default in zip(keys, defaults, strict=True))
