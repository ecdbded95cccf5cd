"""What the fields of a manifest may be. It comes from whoever handed out the checkpoint. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Set

_LARGEST_COUNT = 2**63 - 1
# Of the folder itself, or of a folder in it; as checkpoints name them, with all else in tables' names quoted.
_PART = r"(?!\.+(?:/|\Z))[\w.~%-]+"
_FILE_NAME = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
_LONGEST_NAME = 512
_CHECKSUM = re.compile(r"[0-9a-f]{64}")


def check_fields(fields: object, names: Set[str]) -> None:
    """See that the fields of a manifest are of their types, and that its files lie in its folder.

    Args:
        fields: as JSON gives them.
        names: of the fields.

    Raises:
        ValueError: they are not; says which.
    """
    if not isinstance(fields, dict) or fields.keys() != names:
        raise ValueError("its fields are not those of one")
    for name in ("step", "epoch"):
        _expect(_is_count(fields[name]), f"{name} must be a number of them")
    for name in ("tables", "files", "metrics", "progress"):
        _expect(isinstance(fields[name], dict), f"{name} must be an object")
    for table, shape in fields["tables"].items():
        is_shape = _is_list(shape, 3) and all(map(_is_count, shape)) and shape[2] > 0
        _expect(is_shape, f"table {table!r:.80} must have a number of rows, a width, and a number of files")
    for file, entry in fields["files"].items():
        is_name = len(file) <= _LONGEST_NAME and _FILE_NAME.fullmatch(file)
        _expect(is_name, f"{file!r:.80} cannot be the name of a file in a checkpoint")
        is_entry = _is_list(entry, 2) and _is_count(entry[0]) and _is_checksum(entry[1])
        _expect(is_entry, f"file {file} must have a size and a checksum")
    for metric, value in fields["metrics"].items():
        _expect(_is_number(value), f"metric {metric!r:.80} must be a number")
    best = fields["progress"].get("best")
    _expect(best is None or _is_best(best), "best must be a metric, its value, and a step")


def _expect(is_right: object, rule: str) -> None:
    if not is_right:
        raise ValueError(rule)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def _is_number(value: object) -> bool:
    return type(value) is int or type(value) is float


def _is_list(value: object, size: int) -> bool:
    return isinstance(value, list) and len(value) == size


def _is_checksum(value: object) -> bool:
    return isinstance(value, str) and _CHECKSUM.fullmatch(value) is not None


def _is_best(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and isinstance(value[0], str)
        and _is_number(value[1])
        and _is_count(value[2])
    )
