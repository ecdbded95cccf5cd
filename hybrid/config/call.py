"""Values that are names with arguments, such as ``adam(betas = [0.9, 0.99])`` or ``hash(1000)``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid.config.key import Key
from hybrid.config.toml_values import parse_toml, toml_value
from hybrid.errors import ConfigError

_FORM = re.compile(r"\s*([\w.:]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_NAMED = re.compile(r"\s*\w+\s*=")


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


class Signatures:
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
