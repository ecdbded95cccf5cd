"""Columns of any type to labels, numbers and categorical values.

Text arrives as strings; Parquet brings integers, floats, booleans, dictionaries and lists too. A null is a
missing value, and so is NaN in a float column (it is what numpy and pandas write for one).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

MAX_NUMBER = float(np.finfo(np.float32).max)
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


def is_list(column: Any) -> bool:
    """Whether every row holds any number of values."""
    kind = column.type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def to_strings(column: Any) -> Any:
    """A flat column as strings without surrounding blanks: 7 for 7 and 7.0, 1 for true; nulls stay."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    return pc.utf8_trim_whitespace(column.cast(pa.string()))


def values(column: Any, missing: tuple[str, ...], separator: str = "") -> Any:
    """A categorical column as strings, null where missing; or as lists of strings, none null.

    Args:
        column: n rows.
        missing: strings that mean missing; dropped from lists.
        separator: splits a flat column into lists where it is not empty.
    """
    if is_list(column):
        lists = column
    elif separator:
        lists = pc.split_pattern(pc.fill_null(to_strings(column), ""), separator)
    else:
        return _without(to_strings(column), missing)
    items = _without(to_strings(pc.list_flatten(lists)), missing)
    lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
    present = np.asarray(items.is_valid())
    kept_before = np.concatenate([[0], np.cumsum(present)])
    offsets = kept_before[np.concatenate([[0], np.cumsum(lengths)])]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items.drop_null())


def numbers(column: Any, missing: tuple[str, ...]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """A numeric column as float64 with NaN where missing, and which of its values are not finite numbers."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    malformed: npt.NDArray[np.bool_] = np.zeros(len(column), bool)
    if text:
        column = _without(to_strings(column), missing)
        given = np.asarray(column.is_valid())
        try:
            column = column.cast(pa.float64())
        except pa.ArrowInvalid:
            well_formed = pc.match_substring_regex(column, _NUMBER)
            malformed = given & ~np.asarray(pc.fill_null(well_formed, False))
            column = pc.if_else(well_formed, column, None).cast(pa.float64())
    else:
        column = column.cast(pa.float64(), safe=False)
    numbers_B = np.array(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        out_of_range = np.abs(numbers_B) > MAX_NUMBER
    not_numbers = malformed | out_of_range
    if text:  # the word "nan" is no number
        not_numbers |= given & np.isnan(numbers_B)
    return numbers_B, not_numbers


def labels(
    column: Any, positive: tuple[str, ...], negative: tuple[str, ...]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """A label column as 0 and 1, and which of its values are neither."""
    position = pc.index_in(to_strings(column), value_set=pa.array([*positive, *negative], pa.string()))
    unknown = np.asarray(position.is_null())
    return (np.asarray(pc.fill_null(position, 0)) < len(positive)).astype(np.uint8), unknown


def _without(strings: Any, missing: tuple[str, ...]) -> Any:
    """``strings`` with null for those in ``missing``."""
    if not missing:
        return strings
    return pc.if_else(pc.is_in(strings, value_set=pa.array(missing, pa.string())), None, strings)
