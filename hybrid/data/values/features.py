"""Columns of data.sparse from the columns of the files, each by its kind; invalid rows are rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config.resolved_columns import Column
from hybrid.data.values import dates, weighted_ids
from hybrid.data.values.column_values import MAX_VALUE_BYTES, Values, cut, is_list, numbers, values
from hybrid.data.values.invalid_rows import Reason, Reject

_SEPARATOR = "\x1f"  # the unit separator of ASCII, between the values of a cross


class Feature(NamedTuple):
    """A column of data.sparse of B rows.

    Attributes:
        values: as in :class:`hybrid.data.parse.sources.RawBlock`.
        weights: array of B lists of float32, if its ids have weights.
    """

    values: pa.Array
    weights: pa.Array | None = None


def feature(
    column: Column, table: Mapping[str, pa.Array], missing: tuple[str, ...], reject: Reject
) -> Feature:
    """Compute a column, invalid rows included.

    Args:
        table: the columns of the file.
        missing: texts that mean missing.

    Raises:
        ArrowException: the type of a column of the file does not fit.
    """
    match column.kind:
        case "buckets":
            numbers_B, wrong_B = numbers(table[column.source], missing)
            reject(wrong_B, Reason.NUMBER, column.source, "a finite number")
            return Feature(pa.array(numbers_B, mask=np.isnan(numbers_B)))
        case "hour" | "weekday":
            numbers_B, wrong_B = dates.parts_of_dates(table[column.source], missing, column.kind)
            reject(wrong_B, Reason.DATE, column.source, dates.EXPECTED)
            return Feature(pa.array(numbers_B, mask=np.isnan(numbers_B)))
        case "cross":
            crossed = []
            for name in column.sources:
                if is_list(table[name]):
                    raise pa.ArrowTypeError(f"column {name} holds {table[name].type}, which has no cross")
                found = values(table[name], missing)
                _reject_values(found, name, reject)
                crossed.append(found.coded)
            return Feature(cross(crossed))
        case "weighted":
            weighted = weighted_ids.weighted(
                table[column.source], missing, column.separator, column.weight_separator
            )
            _reject_values(weighted.values, column.source, reject)
            reject(weighted.wrong_B, Reason.ID_WEIGHT, column.source, weighted_ids.EXPECTED)
            return _limit_ids(column, Feature(weighted.values.coded, weighted.weights), reject)
        case _:
            found = values(table[column.source], missing, column.separator)
            _reject_values(found, column.source, reject)
            return _limit_ids(column, Feature(found.coded), reject)


def cross(columns: Sequence[pa.DictionaryArray]) -> pa.DictionaryArray:
    """Return the combination of the values of columns of one value a row; null where one of them is null."""
    indices_CB = np.stack([np.asarray(each.indices.fill_null(-1)).astype(np.int64) for each in columns])
    code_B: npt.NDArray[np.int64] = np.zeros(indices_CB.shape[1], np.int64)
    for each, index_B in zip(columns, indices_CB, strict=True):
        # Codes are numbered anew for each column, so that their products stay small.
        _, code_B = np.unique(code_B * (len(each.dictionary) + 1) + index_B + 1, return_inverse=True)
    _, first_N, code_B = np.unique(code_B, return_index=True, return_inverse=True)
    texts = [
        [None if i < 0 else words[i] for i in index_B[first_N].tolist()]
        for words, index_B in zip((c.dictionary.to_pylist() for c in columns), indices_CB, strict=True)
    ]
    joined = [_SEPARATOR.join(text or "" for text in combination) for combination in zip(*texts, strict=True)]
    absent_B = (indices_CB < 0).any(axis=0)
    coded = pa.array(code_B.astype(np.int32), pa.int32(), mask=absent_B)
    return pa.DictionaryArray.from_arrays(coded, pa.array(joined, pa.string()))


def _reject_values(found: Values, name: str, reject: Reject) -> None:
    reject(found.inexact_B, Reason.INEXACT, name, "an id that a float holds exactly")
    reject(found.too_long_B, Reason.LONG, name, f"at most {MAX_VALUE_BYTES:,} bytes")


def _limit_ids(column: Column, found: Feature, reject: Reject) -> Feature:
    """Return at most ``max_ids`` ids of each row, if there is such a limit."""
    if not column.max_ids or not is_list(found.values):
        return found
    if column.too_many_ids == "invalid_row":
        is_over_B = np.diff(np.asarray(found.values.offsets)) > column.max_ids
        reject(is_over_B, Reason.MANY, column.source, f"at most {column.max_ids} ids")
        return found
    from_start = column.too_many_ids == "keep_first"
    return Feature(*(cut(each, column.max_ids, from_start=from_start) for each in found if each is not None))
