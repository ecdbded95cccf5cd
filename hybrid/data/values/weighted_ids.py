"""Ids with weights: ``tag:0.7|other:0.2`` in text; maps, or lists of pairs, in Parquet."""

from __future__ import annotations

import re
from typing import NamedTuple

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
    keep_items,
    numbers,
)

EXPECTED = "a weight for each id, finite and at least 0"


class Weighted(NamedTuple):
    """A column of weighted ids of B rows.

    Attributes:
        values: the ids, as lists.
        weights: array of B lists of float32, as long as the lists of ids.
        wrong_B: rows with an id whose weight is missing, negative, or not finite.
    """

    values: Values
    weights: pa.ListArray
    wrong_B: npt.NDArray[np.bool_]


def weighted(column: pa.Array, missing: tuple[str, ...], separator: str, weight_separator: str) -> Weighted:
    """Return a column of ids and their weights.

    Args:
        column: n rows of text, or of lists of texts or of pairs of an id and a weight.
        missing: texts that mean missing; such ids are dropped.
        separator: splits text into ids; empty if a row holds one id.
        weight_separator: stands between an id and its weight; the last one of an id counts.

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
    values = keep_items(flat, lengths_B)
    kept_L = np.where(wrong_L, 0.0, weights_L)[present_L].astype(np.float32)
    wrong_B = np.zeros(len(lists), np.bool_)
    wrong_B[rows_L[wrong_L]] = True
    return Weighted(values, pa.ListArray.from_arrays(values.coded.offsets, pa.array(kept_L)), wrong_B)


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
