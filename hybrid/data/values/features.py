"""Columns of data.sparse from the columns of the files, each by its kind; invalid rows are rejected."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.config.resolved_columns import Column
from hybrid.data.values import dates
from hybrid.data.values.column_values import (
    MAX_VALUE_BYTES,
    Values,
    cut,
    decoded,
    flat_values,
    is_list,
    is_text,
    keep_items,
    numbers,
    values,
)
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
            found, weights, wrong_B = weighted_ids(
                table[column.source], missing, column.separator, column.weight_separator
            )
            _reject_values(found, column.source, reject)
            expected = "a weight for each id, finite and at least 0"
            reject(wrong_B, Reason.ID_WEIGHT, column.source, expected)
            return _limit_ids(column, Feature(found.coded, weights), reject)
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
        [None if i < 0 else values[i] for i in index_B[first_N].tolist()]
        for values, index_B in zip((c.dictionary.to_pylist() for c in columns), indices_CB, strict=True)
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


def weighted_ids(
    column: pa.Array, missing: tuple[str, ...], separator: str, weight_separator: str
) -> tuple[Values, pa.ListArray, npt.NDArray[np.bool_]]:
    """Return a column of ids with weights: ``tag:0.7|other:0.2`` in text; maps or lists of pairs in Parquet.

    Args:
        column: n rows of text, or of lists of texts or of pairs of an id and a weight.
        missing: texts that mean missing; such ids are dropped.
        separator: splits text into ids; empty if a row holds one id.
        weight_separator: stands between an id and its weight; the last one of an id counts.

    Returns:
        The ids, as lists; lists of float32 weights, as long; and which rows have an id whose weight is
        missing, negative, or not finite.

    Raises:
        ArrowException: the column is of another type.
    """
    if is_list(column):
        lists = column
    else:
        column = decoded(column)
        if not is_text(column):
            raise pa.ArrowTypeError(f"no ids with weights, but {column.type}")
        texts = pc.fill_null(column.cast(pa.string()), "")
        if separator:
            lists = pc.split_pattern(texts, separator)
        else:
            lists = pa.ListArray.from_arrays(pa.array(np.arange(len(texts) + 1), pa.int32()), texts)
    lengths_B = np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
    ids, weights = _split_items(pc.list_flatten(lists), missing, weight_separator)
    flat = flat_values(ids, missing)
    weights_L, wrong_L = numbers(weights, ())
    present_L = np.asarray(flat.coded.is_valid())
    wrong_L = present_L & (wrong_L | np.isnan(weights_L) | (weights_L < 0))
    rows_L = np.repeat(np.arange(len(lists)), lengths_B)
    kept = keep_items(flat, lengths_B)
    kept_L = np.where(wrong_L, 0.0, weights_L)[present_L].astype(np.float32)
    wrong_B = np.zeros(len(lists), np.bool_)
    wrong_B[rows_L[wrong_L]] = True
    return kept, pa.ListArray.from_arrays(kept.coded.offsets, pa.array(kept_L)), wrong_B


def _split_items(
    items: pa.Array, missing: tuple[str, ...], weight_separator: str
) -> tuple[pa.Array, pa.Array]:
    """Return the ids of items, null if missing, and their weights, null if there is none."""
    if pa.types.is_struct(items.type):
        if items.type.num_fields != 2:
            raise pa.ArrowTypeError(f"no pairs of an id and a weight, but {items.type}")
        ids, weights = items.flatten()
        return ids, weights
    items = decoded(items)
    if not is_text(items):
        raise pa.ArrowTypeError(f"no ids with weights, but lists of {items.type}")
    items = pc.utf8_trim_whitespace(items)
    items = pc.if_else(pc.is_in(items, value_set=pa.array(missing, pa.string())), None, items)
    pairs = pc.extract_regex(items, rf"(?s)^(?P<id>.*){re.escape(weight_separator)}(?P<weight>.*)$")
    ids, weights = pairs.flatten()
    # An item without a separator is an id without a weight.
    return pc.if_else(pc.is_null(ids), items, ids), weights
