"""Ids with weights: ``tag:0.7|other:0.2`` in text; maps, or lists of pairs, in Parquet."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.data.values.column_values import (
    Values,
    decoded,
    flat_values,
    is_list,
    is_text,
    kept_items,
    numbers,
)

EXPECTED = "a weight for each id, finite and at least 0"


class Weighted(NamedTuple):
    """A column of weighted ids of B rows.

    Attributes:
        values: the ids, as lists.
        weights: array of B lists of float32, as long as those of the ids.
        wrong_B: rows with an id that has no weight, a negative one, or one that is no finite number.
    """

    values: Values
    weights: Any
    wrong_B: npt.NDArray[np.bool_]


def weighted(column: Any, missing: tuple[str, ...], separator: str, weight_separator: str) -> Weighted:
    """A column of ids and their weights.

    Args:
        column: n rows of text, or of lists of texts or of pairs of an id and a weight.
        missing: texts that mean missing; such ids are dropped.
        separator: splits text into ids; empty where a row holds one.
        weight_separator: stands between an id and its weight; the last one in an id's text counts.

    Raises:
        ArrowException: it is of another type.
    """
    lists = _as_lists(column, separator)
    items = pc.list_flatten(lists)
    lengths_B = np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
    ids, weights = _split(items, missing, weight_separator)
    flat = flat_values(ids, missing)
    weights_L, wrong_L = numbers(weights, ())
    present_L = np.asarray(flat.coded.is_valid())
    wrong_L = present_L & (wrong_L | np.isnan(weights_L) | (weights_L < 0))
    rows_L = np.repeat(np.arange(len(lists)), lengths_B)
    values = kept_items(flat, lengths_B)
    kept_L = np.where(wrong_L, 0.0, weights_L)[present_L].astype(np.float32)
    wrong_B = np.zeros(len(lists), np.bool_)
    wrong_B[rows_L[wrong_L]] = True
    return Weighted(values, pa.ListArray.from_arrays(values.coded.offsets, pa.array(kept_L)), wrong_B)


def _as_lists(column: Any, separator: str) -> Any:
    """The items of each row, texts or pairs."""
    if is_list(column):
        return column
    column = decoded(column)
    if not is_text(column):
        raise pa.ArrowTypeError(f"no ids with weights, but {column.type}")
    texts = pc.fill_null(column.cast(pa.string()), "")
    if separator:
        return pc.split_pattern(texts, separator)
    return pa.ListArray.from_arrays(pa.array(np.arange(len(texts) + 1), pa.int32()), texts)


def _split(items: Any, missing: tuple[str, ...], weight_separator: str) -> tuple[Any, Any]:
    """The ids of items, null where missing, and their weights, null where there is none."""
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
    parts = pc.extract_regex(items, rf"(?s)^(?P<id>.*){re.escape(weight_separator)}(?P<weight>.*)$")
    ids, weights = parts.flatten()
    # What has no separator is an id without a weight.
    return pc.if_else(pc.is_null(ids), items, ids), weights
