"""Safe reading of JSON and of NumPy arrays from files that another user may have written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from hybrid.storage.files import local_copy
from hybrid.storage.remote_path import StoragePath

if TYPE_CHECKING:
    import numpy.typing as npt

_MAX_LEVELS = 64  # of nested JSON
_MAX_INTEGER = 1 << 64
_MAX_ITEM_BYTES = 8
_COMPONENT = r"(?!\.+(?:/|\Z))[\w.~%-]+"
_INNER_NAME = re.compile(rf"(?:{_COMPONENT}/)?{_COMPONENT}", re.ASCII)
_MAX_NAME_LENGTH = 512

Fields = TypeVar("Fields")


def parse_json(content: bytes | str) -> Any:
    """Parse JSON; ValueError for invalid text, deep nesting, integers over 64 bits, or lone surrogates."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check(value, _MAX_LEVELS)
    return value


def _check(value: Any, levels: int) -> None:
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError("it is nested too deeply")
        for each in value if isinstance(value, list) else (*value, *value.values()):
            _check(each, levels - 1)
    elif isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        raise ValueError("it has an integer of more than 64 bits")
    elif isinstance(value, str) and not value.isascii():
        value.encode()  # raises an error for half of a surrogate pair


def replace_non_finite(value: Any) -> Any:
    """Replace NaN and infinite numbers by None, in a value and in nested mappings, but not in lists."""
    if isinstance(value, Mapping):
        return {name: replace_non_finite(element) for name, element in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_fields(kind: type[Fields], content: Any) -> Fields:
    """Create the dataclass ``kind`` from a JSON object; TypeError or ValueError if a field is bad or missing.

    Fields are plain values, dataclasses, named tuples, and tuples and dictionaries of these.
    """
    hints = get_type_hints(kind)
    return kind(**{name: parse_value(name, hints.get(name, ()), content[name]) for name in content})


def parse_value(name: str, hint: Any, value: Any) -> Any:
    """Convert a JSON value to the type ``hint``, or raise TypeError or ValueError; ``name`` is for errors."""
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return parse_fields(hint, value)
    if isinstance(hint, type) and issubclass(hint, tuple) and isinstance(value, list):  # a NamedTuple
        return parse_fields(hint, dict(zip(get_type_hints(hint), value, strict=True)))
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is tuple and isinstance(value, list):
        hints = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        if len(hints) == len(value):
            return tuple(parse_value(name, each, item) for each, item in zip(hints, value, strict=True))
    if kind is dict and isinstance(value, dict):
        return {key: parse_value(key, arguments[1], each) for key, each in value.items()}
    if hint is Any:
        return value
    plain = () if kind in (tuple, dict) else hint
    is_number = type(value) is int and isinstance(0.0, plain)
    if not is_number and (not isinstance(value, plain) or isinstance(value, bool) != (plain is bool)):
        raise TypeError(f"{name!r:.80} is {value!r:.80}")
    return value


def is_inner_name(text: str) -> bool:
    """Return whether a text has the form NAME or FOLDER/NAME, so that it cannot lead out of a folder."""
    return len(text) <= _MAX_NAME_LENGTH and _INNER_NAME.fullmatch(text) is not None


def map_array(
    path: StoragePath, root: StoragePath | None = None, *, follows_links: bool = False
) -> npt.NDArray[Any]:
    """Map a ``.npy`` file of numbers or booleans read-only; ValueError if invalid. See :func:`local_copy`."""
    import numpy as np  # commands such as config do without it

    with local_copy(path, root=root, follows_links=follows_links) as local:
        try:
            with np.errstate(over="raise"):
                array = np.load(local, mmap_mode="r", allow_pickle=False)
        except (ArithmeticError, EOFError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"it has an invalid header: {error}") from error
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind not in "biuf"
        or array.itemsize > _MAX_ITEM_BYTES
    ):
        raise ValueError("it is not an array of numbers")
    # Not as numpy.memmap: slicing one costs more than reading the rows of a small batch.
    return np.asarray(array)
