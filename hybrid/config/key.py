"""One key of a configuration: its default, what it means, and the rule its value must keep."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from hybrid.errors import ConfigError

OWN_FUNCTION = r"\w+(\.\w+)*:\w+"  # code of the user's own, as module:function
_KINDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
_LISTS: dict[Any, str] = {int: "a list of integers", float: "a list of finite numbers", str: "a list of text"}


def option(default: Any, meaning: str, **more: Any) -> Any:
    """The field of a section that is a key; ``more`` is of what :class:`Key` has defaults for."""
    return field(default=default, metadata={"meaning": meaning, **more})


fixed = partial(option, is_fixed=True)
by_host = partial(option, is_by_host=True)


@dataclass(frozen=True)
class Key:
    """One key of a section: its type, the rule its value must keep, and what depends on it.

    Attributes:
        is_fixed: whether a run that goes on must have it as before, since its tensors depend on it, or where
            in the data its step is.
        is_by_host: whether a role may be given a value of its own, where it is started; all others are the
            master's to say.
        prepares: whether prepared data depend on it; only of the sections [data] and [columns.NAME].
        absent: what it comes to where it is None, if not what it comes to in the rest of its section.
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
    is_fixed: bool = False
    is_by_host: bool = False
    prepares: bool = True
    absent: str = ""

    @classmethod
    def of(cls, of: dataclasses.Field[Any], hint: Any) -> Key:
        is_list = get_origin(hint) is tuple
        kind = get_args(hint)[0] if get_args(hint) else hint  # tuple[T, ...] and T | None
        return cls(of.name, kind, is_list, of.default, **of.metadata)

    @property
    def rule(self) -> str:
        """What a value must be, in words, for example ``an integer, at least 1``."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = _LISTS[self.kind] if self.is_list else _KINDS[self.kind]
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (("above", self.above), ("at least", self.minimum), ("at most", self.maximum))
            if bound is not None
        ]
        return ", ".join([kind, *bounds])

    def read(self, value: Any) -> Any:
        """``value`` as this key holds it: TOML lists become tuples and integers floats where due."""
        if self.is_list and isinstance(value, list):
            return tuple(self._of_kind(element) for element in value)
        value = self._of_kind(value)
        is_lone = self.is_list and type(value) is self.kind and "," not in str(value)
        return (value,) if is_lone else value

    def _of_kind(self, value: Any) -> Any:
        is_whole = self.kind is float and type(value) is int and abs(value) <= sys.float_info.max
        return float(value) if is_whole else value

    def parse(self, text: str) -> Any:
        """The value that ``--set`` gives as ``text``: TOML, or the text itself."""
        try:
            document = tomllib.loads(f"value = {text}")
        except ValueError:
            return text
        value = document.pop("value")
        is_toml = not document and (self.kind is not str or isinstance(value, str | list))
        return value if is_toml else text

    def check(self, dotted: str, value: Any) -> None:
        """ConfigError where ``value`` breaks the rule of this key."""
        elements = value if self.is_list else (value,)
        if not isinstance(elements, tuple) or not all(self._accepts(element) for element in elements):
            raise ConfigError(dotted, f"must be {self.rule}", value)

    def _accepts(self, value: Any) -> bool:
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            return False  # type(), since a bool is an instance of int
        if self.choices:
            return value in self.choices
        if self.kind not in (int, float):
            return True
        return (
            abs(value) <= sys.float_info.max  # False for NaN and infinity
            and (self.above is None or value > self.above)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
        )


def keys_of(section: Any) -> dict[str, Key]:
    """The keys of a section, a dataclass of fields made by :func:`option`, by their names."""
    hints = get_type_hints(section)
    return {field.name: Key.of(field, hints[field.name]) for field in dataclasses.fields(section)}
