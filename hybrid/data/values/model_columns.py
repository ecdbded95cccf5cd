"""The columns of a model from the columns of a file: features, labels, weights and groups.

Invalid rows are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.config import DataSection, TaskSection
from hybrid.config.data_sections import Column
from hybrid.config.sections import tasks_of
from hybrid.data.values.column_values import (
    MAX_VALUE_BYTES,
    Mask,
    Values,
    decode_texts,
    group_items,
    hash_values,
    is_list,
    is_text,
    list_lengths,
    parse_date_parts,
    parse_flat_values,
    parse_labels,
    parse_numbers,
    parse_values,
    split_texts,
    truncate_lists,
)
from hybrid.data.values.invalid_rows import Reason, Reject
from hybrid.errors import ConfigError

_SEPARATOR = "\x1f"  # the unit separator of ASCII, between the values of a cross
_DATE = "a date such as 2024-01-31 09:30:00, or seconds since 1970"


def compute_feature(
    column: Column, table: Mapping[str, pa.Array], missing: tuple[str, ...], reject: Reject
) -> tuple[pa.Array, pa.Array | None]:
    """Compute a column of data.sparse from the columns of a file, for all rows.

    Args:
        reject: called with the invalid rows, whose values have no meaning.

    Returns:
        The values, as in :class:`hybrid.data.parse.sources.RawBlock`; and the weights of ids as lists of
        float32, or None.

    Raises:
        ArrowException: the type of a column of the file does not fit.
    """
    match column.kind:
        case "buckets":
            numbers_B, wrong_B = parse_numbers(table[column.source], missing)
            reject(wrong_B, Reason.NUMBER, column.source, "a finite number")
            return pa.array(numbers_B, mask=np.isnan(numbers_B)), None
        case "hour" | "weekday":
            form = column.date_format
            numbers_B, wrong_B = parse_date_parts(table[column.source], missing, column.kind, form)
            reject(wrong_B, Reason.DATE, column.source, f"a date of the form {form}" if form else _DATE)
            return pa.array(numbers_B, mask=np.isnan(numbers_B)), None
        case "cross":
            crossed = []
            for name in column.sources:
                if is_list(table[name]):
                    raise pa.ArrowTypeError(
                        f"column {name} holds {table[name].type}, which cannot be crossed"
                    )
                found = parse_values(table[name], missing)
                _reject_values(found, name, reject)
                crossed.append(found.coded.dictionary_decode())
            # Null where one of the values is null.
            joined = pc.binary_join_element_wise(*crossed, _SEPARATOR)
            return joined.dictionary_encode(), None
        case "weighted":
            found, weights, wrong_B = weighted_ids(
                table[column.source], missing, column.separator, column.weight_separator
            )
            _reject_values(found, column.source, reject)
            expected = "a weight for each id, finite and at least 0"
            reject(wrong_B, Reason.ID_WEIGHT, column.source, expected)
            return _limit_ids(column, found.coded, weights, reject)
        case _:
            found = parse_values(table[column.source], missing, column.separator)
            _reject_values(found, column.source, reject)
            return _limit_ids(column, found.coded, None, reject)


def _reject_values(found: Values, name: str, reject: Reject) -> None:
    reject(found.inexact_B, Reason.INEXACT, name, "an id that a float holds exactly")
    reject(found.too_long_B, Reason.LONG, name, f"at most {MAX_VALUE_BYTES:,} bytes")


def _limit_ids(
    column: Column, ids: pa.Array, weights: pa.Array | None, reject: Reject
) -> tuple[pa.Array, pa.Array | None]:
    """Apply the limit ``max_ids`` of the column to each row, if the column has one."""
    if not column.max_ids or not is_list(ids):
        return ids, weights
    if column.too_many_ids == "invalid_row":
        is_over_B = np.diff(np.asarray(ids.offsets)) > column.max_ids
        reject(is_over_B, Reason.MANY, column.source, f"at most {column.max_ids} ids")
        return ids, weights
    limit, from_start = column.max_ids, column.too_many_ids == "keep_first"
    kept = truncate_lists(ids, limit, from_start=from_start)
    return kept, None if weights is None else truncate_lists(weights, limit, from_start=from_start)


def weighted_ids(
    column: pa.Array, missing: tuple[str, ...], separator: str, weight_separator: str
) -> tuple[Values, pa.ListArray, Mask]:
    """Return a column of ids with weights: ``tag:0.7|other:0.2`` in text; maps or lists of pairs in Parquet.

    Args:
        column: n rows of text, or of lists of texts or of pairs of an id and a weight.
        missing: texts that mean missing; such ids are dropped.
        separator: splits text into ids; empty if a row holds one id.
        weight_separator: separates an id and its weight; only the last occurrence in an item separates.

    Returns:
        The lists of ids; lists of float32 weights of the same lengths; and a mask of the rows with a weight
        that is missing, negative, or not finite.

    Raises:
        ArrowException: the column is of another type.
    """
    lists = column
    if not is_list(column):
        column = decode_texts(column)
        if not is_text(column):
            raise pa.ArrowTypeError(f"expected ids with weights, found {column.type}")
        texts = pc.fill_null(column.cast(pa.string()), "")
        if separator:
            lists = split_texts(texts, separator)
        else:
            lists = pa.ListArray.from_arrays(pa.array(np.arange(len(texts) + 1), pa.int32()), texts)
    lengths_B = list_lengths(lists)
    ids, weights = _split_items(pc.list_flatten(lists), missing, weight_separator)
    flat = parse_flat_values(ids, missing)
    weights_L, wrong_L = parse_numbers(weights, ())
    present_L = np.asarray(flat.coded.is_valid())
    wrong_L = present_L & (wrong_L | np.isnan(weights_L) | (weights_L < 0))
    rows_L = np.repeat(np.arange(len(lists)), lengths_B)
    kept = group_items(flat, lengths_B)
    kept_L = np.where(wrong_L, 0.0, weights_L)[present_L].astype(np.float32)
    wrong_B = np.zeros(len(lists), np.bool_)
    wrong_B[rows_L[wrong_L]] = True
    return kept, pa.ListArray.from_arrays(kept.coded.offsets, pa.array(kept_L)), wrong_B


def _split_items(
    items: pa.Array, missing: tuple[str, ...], weight_separator: str
) -> tuple[pa.Array, pa.Array]:
    """Return the ids of items, null if missing, and their weights, null if missing."""
    if pa.types.is_struct(items.type):
        if items.type.num_fields != 2:
            raise pa.ArrowTypeError(f"expected pairs of an id and a weight, found {items.type}")
        (_, ids), (_, weights) = sorted(zip(items.type, items.flatten(), strict=True), key=_weight_likeness)
        return ids, weights
    items = decode_texts(items)
    if not is_text(items):
        raise pa.ArrowTypeError(f"expected ids with weights, found lists of {items.type}")
    items = pc.utf8_trim_whitespace(items)
    items = pc.if_else(pc.is_in(items, value_set=pa.array(missing, pa.string())), None, items)
    pairs = pc.extract_regex(items, rf"(?s)^(?P<id>.*){re.escape(weight_separator)}(?P<weight>.*)$")
    ids, weights = pairs.flatten()
    # An item without a separator is an id without a weight.
    return pc.if_else(pc.is_null(ids), items, ids), weights


def _weight_likeness(pair: tuple[pa.Field, pa.Array]) -> tuple[bool, ...]:
    """Return a sort key by which the id of a struct precedes its weight; equal fields keep their order."""
    name, kind = pair[0].name.lower(), pair[0].type
    is_id = name in ("key", "id")  # the key of a map, too
    return not is_id, name == "weight", pa.types.is_floating(kind), pa.types.is_integer(kind)


def flat_column(table: Mapping[str, pa.Array], name: str, key: str) -> pa.Array:
    """Return a column with one value per row; raise ConfigError for ``key`` if the column holds lists."""
    if is_list(table[name]):
        raise ConfigError(key, "must be a column with one value per row, but this column holds lists", name)
    return table[name]


class Targets(NamedTuple):
    """The targets of B samples for T tasks.

    Attributes:
        labels_BT: float32; undefined where a task's mask excludes a sample.
        weights_BT: float32, 0 where a mask excludes a sample; None if all samples have the same weight.
        groups_B: int64, a hash of the group; None without groups.
    """

    labels_BT: npt.NDArray[np.float32]
    weights_BT: npt.NDArray[np.float32] | None = None
    groups_B: npt.NDArray[np.int64] | None = None

    def select(self, mask_B: npt.NDArray[np.bool_]) -> Targets:
        """Return the samples where ``mask_B`` is true."""
        return Targets(*(None if array is None else array[mask_B] for array in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TargetSpec:
    """The targets of a run.

    Attributes:
        tasks: by name, each with its label column.
        data: the section that names the columns of weights and groups.
        is_implied: whether there are no sections [tasks.NAME], so that data.label is the only task.
    """

    tasks: Mapping[str, TaskSection]
    data: DataSection
    is_implied: bool

    @classmethod
    def of(cls, tasks: Mapping[str, TaskSection], data: DataSection) -> TargetSpec:
        """Return the targets of the sections [tasks.NAME] and [data]."""
        return cls(tasks_of(tasks, data), data, not tasks)

    @property
    def has_weights(self) -> bool:
        """Whether samples may have different weights."""
        return bool(self.data.weight) or any(task.mask for task in self.tasks.values())

    @property
    def has_groups(self) -> bool:
        """Whether samples have groups."""
        return bool(self.data.group)

    @property
    def is_binary(self) -> bool:
        """Whether every label is 0 or 1."""
        return all(task.kind == "binary" for task in self.tasks.values())

    def columns(self) -> list[tuple[str, str]]:
        """Return pairs of a configuration key and the column that the key names."""
        named = [("data.weight", self.data.weight), ("data.group", self.data.group)]
        for name, task in self.tasks.items():
            named.append(("data.label" if self.is_implied else f"tasks.{name}.label", task.label))
            named.append((f"tasks.{name}.mask", task.mask))
        return [(key, column) for key, column in named if column]

    def read(self, table: Mapping[str, pa.Array], reject: Reject) -> Targets:
        """Return the targets of a table of columns; ``reject`` is called with the invalid rows."""
        data = self.data
        known = (data.positive_labels, data.negative_labels)
        label_texts = " or ".join(map(repr, chain(*known)))
        labels_T: list[npt.NDArray[Any]] = []
        counts_T: list[Mask] = []
        for task in self.tasks.values():
            counts_B = np.ones(len(table[task.label]), np.bool_)
            if task.mask:
                mask_B, wrong_B = parse_labels(table[task.mask], *known)
                reject(wrong_B, Reason.LABEL, task.mask, label_texts)
                counts_B = mask_B == 1
            labels_B: npt.NDArray[Any]
            reason, expected = Reason.TARGET, "a finite number"
            if task.kind == "binary":
                labels_B, wrong_B = parse_labels(table[task.label], *known)
                reason, expected = Reason.LABEL, label_texts
            else:
                labels_B, wrong_B = parse_numbers(table[task.label], data.missing)
                wrong_B |= np.isnan(labels_B)
            if task.kind == "classes":
                with np.errstate(invalid="ignore"):
                    wrong_B |= (labels_B < 0) | (labels_B >= task.classes) | (labels_B != np.floor(labels_B))
                expected = f"a class from 0 to {task.classes - 1}"
            # The label of a masked sample is often unknown.
            reject(wrong_B & counts_B, reason, task.label, expected)
            labels_T.append(np.where(wrong_B, 0, labels_B))
            counts_T.append(counts_B)
        labels_BT = np.stack(labels_T, axis=1).astype(np.float32)
        weights_BT = groups_B = None
        if self.has_weights:
            samples_B = np.ones(len(labels_BT), np.float32)
            if data.weight:
                numbers_B, wrong_B = parse_numbers(table[data.weight], data.missing)
                with np.errstate(invalid="ignore"):
                    wrong_B |= ~(numbers_B >= 0)
                reject(wrong_B, Reason.WEIGHT, data.weight, "a weight, a finite number of at least 0")
                samples_B = np.where(wrong_B, 0, numbers_B).astype(np.float32)
            weights_BT = np.stack(counts_T, axis=1) * samples_B[:, None]
        if self.has_groups:
            groups_B, wrong_B = hash_values(flat_column(table, data.group, "data.group"), data.missing)
            reject(wrong_B, Reason.GROUP, data.group, "the group of the sample")
        return Targets(labels_BT, weights_BT, groups_B)
