"""Columns of any type as labels, numbers and categorical values.

Text arrives as strings. Parquet also has integers, floats, booleans, dictionaries and lists. Null is a
missing value, and so is NaN in a column of floats, as numpy and pandas write it.
"""

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.data.values.canonical import canonical, canonical_text, stable_hashes, trimmed

MAX_NUMBER = float(np.finfo(np.float32).max)
MAX_VALUE_BYTES = 4096  # of a categorical value, since vocabularies hold values in memory
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


class Values(NamedTuple):
    """A categorical column of B rows.

    Attributes:
        coded: dictionary array of B strings, null if missing; or array of B lists of such, none null.
        inexact_B: rows with an integer that was written as too large a float.
        too_long_B: rows with a value of more than ``MAX_VALUE_BYTES``.
    """

    coded: pa.Array
    inexact_B: npt.NDArray[np.bool_]
    too_long_B: npt.NDArray[np.bool_]


def is_list(column: pa.Array) -> bool:
    """Return whether each row holds any number of values."""
    kind = column.type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def without_maps(column: pa.Array) -> pa.Array:
    """Return a column, as lists of pairs if it holds maps."""
    if not pa.types.is_map(column.type):
        return column
    pairs = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
    return pa.ListArray.from_arrays(column.offsets, pairs)


def values(column: pa.Array, missing: tuple[str, ...], separator: str = "") -> Values:
    """Return a categorical column in canonical texts (:mod:`hybrid.data.values.canonical`).

    Args:
        missing: texts that mean missing; dropped from lists.
        separator: splits a flat column into lists, if not empty.
    """
    if separator and not is_list(column):
        column = pc.split_pattern(pc.fill_null(decoded(column).cast(pa.string()), ""), separator)
    if not is_list(column):
        return flat_values(column, missing)
    lengths_B = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    return keep_items(flat_values(pc.list_flatten(column), missing), lengths_B)


def keep_items(items: Values, lengths_B: npt.NDArray[np.int64]) -> Values:
    """Return lists of the flat ``items`` that are not null; ``lengths_B`` counts all items of each row."""
    present_L = np.asarray(items.coded.is_valid())
    kept_before = np.concatenate([[0], np.cumsum(present_L)])
    offsets = kept_before[np.concatenate([[0], np.cumsum(lengths_B)])]
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items.coded.drop_null())
    rows_L = np.repeat(np.arange(len(lengths_B)), lengths_B)
    inexact_B, too_long_B = np.zeros((2, len(lengths_B)), np.bool_)
    inexact_B[rows_L[items.inexact_B]] = True
    too_long_B[rows_L[items.too_long_B]] = True
    return Values(lists, inexact_B, too_long_B)


def cut(lists: pa.ListArray, limit: int, *, from_start: bool) -> pa.ListArray:
    """Return the first ``limit`` items of each list, or the last ones."""
    offsets = np.asarray(lists.offsets).astype(np.int64)
    lengths_B = np.diff(offsets)
    position_L = np.arange(lengths_B.sum()) - np.repeat(offsets[:-1] - offsets[0], lengths_B)
    if not from_start:
        position_L = np.repeat(lengths_B, lengths_B) - 1 - position_L
    kept = lists.flatten().filter(pa.array(position_L < limit))
    ends = np.concatenate([[0], np.minimum(lengths_B, limit).cumsum()])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), kept)


def flat_values(column: pa.Array, missing: tuple[str, ...]) -> Values:
    """Return a flat column as :func:`values` does; work on a value is done once for each distinct one."""
    indices, distinct = _distinct(column)
    texts, inexact_D = canonical(distinct)
    too_long_D = np.asarray(pc.fill_null(pc.greater(pc.binary_length(texts), MAX_VALUE_BYTES), False))
    absent_texts = pa.array([canonical_text(text)[0] for text in missing], pa.string())
    absent_D = np.asarray(pc.or_(texts.is_null(), pc.is_in(texts, value_set=absent_texts)))
    # Nulls take the entry after the last.
    index_B = np.asarray(indices.fill_null(len(distinct)))
    absent_B = np.append(absent_D, True)[index_B]
    inexact_B, too_long_B = (
        np.append(mask_D, False)[index_B] if mask_D.any() else np.zeros(len(index_B), np.bool_)
        for mask_D in (inexact_D, too_long_D)
    )
    coded = pa.DictionaryArray.from_arrays(pa.array(index_B, pa.int32(), mask=absent_B), texts)
    return Values(coded, inexact_B & ~absent_B, too_long_B & ~absent_B)


def numbers(
    column: pa.Array, missing: tuple[str, ...]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return a numeric column as float64, NaN if missing, and which of its values are not finite numbers."""
    column = decoded(column)
    has_text = is_text(column)
    if has_text:
        column = trimmed(column)
        column = pc.if_else(pc.is_in(column, value_set=pa.array(missing, pa.string())), None, column)
        given = np.asarray(column.is_valid())
        try:
            column = column.cast(pa.float64())
        except pa.ArrowInvalid:
            well_formed = pc.match_substring_regex(column, _NUMBER)
            column = pc.if_else(well_formed, column, None).cast(pa.float64())
    else:
        column = column.cast(pa.float64(), safe=False)
    numbers_B = np.array(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        not_numbers = np.abs(numbers_B) > MAX_NUMBER
    if has_text:  # malformed texts, and the text "nan"
        not_numbers |= given & np.isnan(numbers_B)
    # If -999 means missing, -999.0 does, too.
    if absent := [float(text) for text in missing if re.match(_NUMBER, text)]:
        numbers_B[np.isin(numbers_B, absent)] = np.nan
    return numbers_B, not_numbers


def hashes(column: pa.Array, missing: tuple[str, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return a hash of each value of a flat column, and which rows have none."""
    coded, inexact_B, too_long_B = values(column, missing)
    hashes_D = np.append(stable_hashes(coded.dictionary), np.uint64(0))
    hashes_B = hashes_D.view(np.int64)[np.asarray(coded.indices.fill_null(len(hashes_D) - 1))]
    return hashes_B, np.asarray(coded.is_null()) | inexact_B | too_long_B


def labels(
    column: pa.Array, positive: tuple[str, ...], negative: tuple[str, ...]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """Return a label column as 0 and 1, by canonical texts, and which of its values are neither."""
    indices, distinct = _distinct(column)
    known = pa.array([canonical_text(text)[0] for text in (*positive, *negative)], pa.string())
    position_D = np.asarray(pc.fill_null(pc.index_in(canonical(distinct)[0], value_set=known), -1))
    position_B = np.append(position_D, -1)[np.asarray(indices.fill_null(len(distinct)))]
    return (position_B < len(positive)).astype(np.uint8), position_B < 0


def _distinct(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the index of the value of each row, null for null, and the distinct values of a flat column."""
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    if len(coded.dictionary) <= len(coded):
        return coded.indices, coded.dictionary
    used = coded.indices.dictionary_encode()  # the dictionary is of more rows than these
    return used.indices, coded.dictionary.take(used.dictionary)


def is_text(column: pa.Array) -> bool:
    """Return whether a flat column holds texts, and not as a dictionary."""
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def decoded(column: pa.Array) -> pa.Array:
    """Return a column without its dictionary, if it has one."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
