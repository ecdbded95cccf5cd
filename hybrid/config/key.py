"""One key of a configuration: its default, its meaning, and the rule for its values."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from hybrid.config.toml_values import parse_toml
from hybrid.errors import ConfigError

if TYPE_CHECKING:
    from hybrid.config.call import Signatures

USER_FUNCTION = r"\w+(\.\w+)*:\w+"  # user code, as module:function
_KINDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
_LISTS: dict[Any, str] = {int: "a list of integers", float: "a list of finite numbers", str: "a list of text"}


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
    signatures: Signatures | None = None
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
    """The keys of a section by name. The section is a dataclass whose fields :func:`option` declares."""
    hints = get_type_hints(section)
    return {field.name: Key.of(field, hints[field.name]) for field in dataclasses.fields(section)}
