"""The columns of a model from the columns of a file: features, labels, weights and groups.

A :class:`ColumnReader` converts the columns of a block, and rejects the rows with invalid values.
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
from hybrid.config.data_sections import GROW, Column
from hybrid.config.sections import tasks_of
from hybrid.data.values import column_values
from hybrid.data.values.canonical import hash_texts
from hybrid.data.values.column_values import MAX_SECONDS, MAX_VALUE_BYTES, Mask, Numbers, Values, is_list
from hybrid.data.values.invalid_rows import InvalidRow, Reason, format_cell
from hybrid.errors import ConfigError

_SEPARATOR = "\x1f"  # the unit separator of ASCII, between the values of a cross
_DATE = "a date such as 2024-01-31 09:30:00, or seconds since 1970"


@dataclass(eq=False)
class ColumnReader:
    """Converts columns of a block of B rows, and rejects rows with invalid values.

    The results for rejected rows are undefined. The argument ``key`` is the configuration key that names the
    column, for messages. ``values``, ``hashes``, ``seconds`` and ``event_times`` raise ConfigError if the
    column holds lists. A method raises ArrowException if the column has an unsuitable type.
    """

    columns: Mapping[str, pa.Array]  # the columns of the block, by name
    lines_B: npt.NDArray[np.int64]  # the line number of each row, for the reports of rejected rows
    missing: tuple[str, ...]  # texts that mean a missing value
    reads_keys: bool = False  # whether integers for growing tables are converted to keys, not to texts

    def __post_init__(self) -> None:
        self.valid_B = np.ones(len(self.lines_B), np.bool_)  # whether a row is valid so far
        self.invalid: list[InvalidRow] = []  # the rejected rows, each with the first reason
        # The name of the column that was read last: an error of Arrow does not name its column.
        self.last = ""

    def column(self, name: str) -> pa.Array:
        self.last = name
        return self.columns[name]

    def flat_column(self, name: str, key: str) -> pa.Array:
        """Return the column ``name``. Raise ConfigError if the column holds lists."""
        if is_list(self.column(name)):
            rule = "must be a column with one value per row, but this column holds lists"
            raise ConfigError(key, rule, name)
        return self.column(name)

    def reject(self, mask_B: Mask, reason: Reason, name: str, expected: str) -> None:
        """Reject the rows where ``mask_B`` is true. Messages name the column, its value and ``expected``."""
        for i in np.flatnonzero(mask_B & self.valid_B).tolist():
            found = f"{name} is {format_cell(self.columns[name], i)}, expected {expected}"
            self.invalid.append(InvalidRow(int(self.lines_B[i]), reason, found))
        self.valid_B[mask_B] = False

    def numbers(self, name: str) -> Numbers:
        """Return a column of numbers, NaN if missing. Reject rows with a value that is no number."""
        numbers_B, wrong_B = column_values.parse_numbers(self.column(name), self.missing)
        self.reject(wrong_B, Reason.NUMBER, name, "a finite number")
        return numbers_B

    def seconds(self, name: str, key: str) -> Numbers:
        """Return the times that determine a split, in seconds since 1970. Reject rows without a time."""
        times_B, wrong_B = column_values.parse_seconds(self.flat_column(name, key), self.missing)
        expected = "a number, or a date such as 2024-01-31 09:30:00"
        self.reject(wrong_B | np.isnan(times_B), Reason.SPLIT, name, expected)
        return times_B

    def event_times(self, name: str) -> Numbers:
        """Return the event times of a stream in seconds since 1970. Reject rows without a valid time."""
        column = self.flat_column(name, "data.stream")
        times_B, wrong_B = column_values.parse_seconds(column, self.missing)
        wrong_B |= ~(np.abs(times_B) < MAX_SECONDS) | column_values.find_digit_dates(column, self.missing)
        self.reject(wrong_B, Reason.TIME, name, _DATE)
        return times_B

    def hashes(self, name: str, key: str, reason: Reason, expected: str) -> npt.NDArray[np.int64]:
        """Return a hash of each value. :meth:`reject` rows with a missing, inexact or too long value."""
        coded, inexact_B, too_long_B = column_values.parse_values(self.flat_column(name, key), self.missing)
        self.reject(np.asarray(coded.is_null()) | inexact_B | too_long_B, reason, name, expected)
        return column_values.take_or_default(hash_texts(coded.dictionary).view(np.int64), coded.indices, 0)

    def values(self, name: str, key: str) -> pa.DictionaryArray:
        """Return canonical texts, null if missing. Reject rows with an inexact or too long value."""
        return self._check_values(column_values.parse_values(self.flat_column(name, key), self.missing), name)

    def feature(self, column: Column) -> tuple[pa.Array, pa.Array | None]:
        """Return a sparse feature and the weights of its ids. Reject rows with invalid values.

        The feature is an array as in ``RawBlock.sparse`` (:mod:`hybrid.data.parse.sources`). The weights are
        lists of float32, or None if the ids have no weights. Raise ConfigError if a column of a cross holds
        lists.
        """
        kind = column.kind
        if kind == "cross":
            coded = [self.values(source, column.key("sparse")) for source in column.sources]
            values = [each.dictionary_decode() for each in coded]
            # The result is null where one of the values is null.
            return pc.binary_join_element_wise(*values, _SEPARATOR).dictionary_encode(), None
        name, weights = column.source, None
        if kind in ("buckets", "hour", "weekday"):
            if kind == "buckets":
                numbers_B = self.numbers(name)
            else:
                dates, date_format = self.column(name), column.arguments["format"]
                numbers_B, wrong_B = column_values.parse_date_parts(dates, self.missing, kind, date_format)
                expected = f"a date of the form {date_format}" if date_format else _DATE
                self.reject(wrong_B, Reason.DATE, name, expected)
            return pa.array(numbers_B, mask=np.isnan(numbers_B)), None
        ids = self.column(name)
        if kind == "weighted":
            ids, weights = self._weighted_ids(column)
        elif self.reads_keys and column.vocabulary.name == GROW and pa.types.is_integer(ids.type):
            return column_values.parse_keys(ids, self.missing), None
        else:
            ids = self._check_values(column_values.parse_values(ids, self.missing, column.separator), name)
        limit = column.max_ids
        if limit and is_list(ids) and column.too_many_ids == "invalid_row":
            is_over_B = np.diff(np.asarray(ids.offsets)) > limit
            self.reject(is_over_B, Reason.MANY, name, f"at most {limit} ids")
        elif limit and is_list(ids):
            from_start = column.too_many_ids == "keep_first"
            ids = column_values.truncate_lists(ids, limit, from_start=from_start)
            if weights is not None:
                weights = column_values.truncate_lists(weights, limit, from_start=from_start)
        return ids, weights

    def reject_digit_dates(self, column: Column) -> None:
        """Reject dates in digits (20240131) if the column has no date format: they would count as seconds."""
        if column.kind in ("hour", "weekday") and not column.arguments["format"]:
            digits_B = column_values.find_digit_dates(self.column(column.source), self.missing)
            expected = f'seconds since 1970, or a date format such as "{column.kind}(%Y%m%d)"'
            self.reject(digits_B, Reason.DATE, column.source, expected)

    def _weighted_ids(self, column: Column) -> tuple[pa.ListArray, pa.ListArray]:
        """Return the list of ids of each row, and the list of their weights. Missing ids are left out.

        A text has the form ``tag:0.7|other:0.2``. A Parquet column may also hold maps, or lists of pairs.
        """
        lists = self.column(column.source)
        if not is_list(lists):
            texts = column_values.decode_texts(lists)
            if not column_values.is_text(texts):
                raise pa.ArrowTypeError(f"expected ids with weights, found {texts.type}")
            lists = column_values.split_texts(texts.cast(pa.string()), column.separator)
        lengths_B = column_values.list_lengths(lists)
        ids, weights = _split_items(pc.list_flatten(lists), self.missing, column.arguments["separator"])
        flat = column_values.parse_flat_values(ids, self.missing)
        ids = self._check_values(column_values.group_values(flat, lengths_B), column.source)
        weights_L, wrong_L = column_values.parse_numbers(weights, ())
        present_L = np.asarray(flat.coded.is_valid())
        wrong_L = present_L & (wrong_L | np.isnan(weights_L) | (weights_L < 0))
        expected = "a weight for each id, finite and at least 0"
        self.reject(column_values.find_rows(wrong_L, lengths_B), Reason.ID_WEIGHT, column.source, expected)
        weights_L = np.where(wrong_L, 0.0, weights_L).astype(np.float32)
        return ids, column_values.group_items(pa.array(weights_L), present_L, lengths_B)

    def _check_values(self, values: Values, name: str) -> pa.Array:
        self.reject(values.inexact_B, Reason.INEXACT, name, "an id that a float holds exactly")
        self.reject(values.too_long_B, Reason.LONG, name, f"at most {MAX_VALUE_BYTES:,} bytes")
        return values.coded


def _split_items(
    items: pa.Array, missing: tuple[str, ...], weight_separator: str
) -> tuple[pa.Array, pa.Array]:
    """Split items, which are texts (``tag:0.7``) or structs of two fields, into ids and weights.

    The weight of a text without a separator is null. The id and the weight of a missing text are null. Raise
    ArrowTypeError if the items have another type.
    """
    if pa.types.is_struct(items.type):
        if items.type.num_fields != 2:
            raise pa.ArrowTypeError(f"expected pairs of an id and a weight, found {items.type}")
        (_, ids), (_, weights) = sorted(zip(items.type, items.flatten(), strict=True), key=_weight_likeness)
        return ids, weights
    items = column_values.decode_texts(items)
    if not column_values.is_text(items):
        raise pa.ArrowTypeError(f"expected ids with weights, found lists of {items.type}")
    items = pc.utf8_trim_whitespace(items)
    items = pc.if_else(pc.is_in(items, value_set=pa.array(missing, pa.string())), None, items)
    pairs = pc.extract_regex(items, rf"(?s)^(?P<id>.*){re.escape(weight_separator)}(?P<weight>.*)$")
    ids, weights = pairs.flatten()
    # An item without a separator is an id without a weight.
    return pc.if_else(pc.is_null(ids), items, ids), weights


def _weight_likeness(pair: tuple[pa.Field, pa.Array]) -> tuple[bool, ...]:
    """Return a key to sort the two fields of a struct: by name and type, the id comes before the weight."""
    name, kind = pair[0].name.lower(), pair[0].type
    is_id = name in ("key", "id")  # the key of a map, too
    return not is_id, name == "weight", pa.types.is_floating(kind), pa.types.is_integer(kind)


class Targets(NamedTuple):
    """The targets of B samples for T tasks."""

    labels_BT: npt.NDArray[np.float32]  # undefined for a sample that is excluded by the task's mask
    weights_BT: npt.NDArray[np.float32] | None = None  # 0 for an excluded sample; None if all are 1
    groups_B: npt.NDArray[np.int64] | None = None  # a hash of ``data.group``; None without groups
    times_B: Numbers | None = None  # event times, in seconds since 1970; None if no column has them

    def select(self, rows: npt.NDArray[np.bool_ | np.int64]) -> Targets:
        """Return the targets of the samples that ``rows``, a mask or indices, selects."""
        return Targets(*(None if array is None else array[rows] for array in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TargetSpec:
    """The columns with the targets of a run: labels, masks, weights, groups and event times."""

    tasks: Mapping[str, TaskSection]  # tasks by name, each with its label column
    data: DataSection  # the section that names the columns of weights, groups and event times
    is_implied: bool  # whether the only task is that of ``data.label``, without sections [tasks.NAME]

    @classmethod
    def of(cls, tasks: Mapping[str, TaskSection], data: DataSection) -> TargetSpec:
        return cls(tasks_of(tasks, data), data, not tasks)

    @property
    def has_weights(self) -> bool:
        return bool(self.data.weight) or any(t.mask or t.kind == "retrieval" for t in self.tasks.values())

    def columns(self) -> list[tuple[str, str]]:
        """Return the columns of targets, as pairs of a configuration key and a column that the key names."""
        data = self.data
        named = [("data.weight", data.weight), ("data.group", data.group), ("data.stream", data.time_column)]
        for name, task in self.tasks.items():
            named.append(("data.label" if self.is_implied else f"tasks.{name}.label", task.label))
            named.append((f"tasks.{name}.mask", task.mask))
        return [(key, column) for key, column in named if column]

    def read(self, reader: ColumnReader) -> Targets:
        """Return the targets of a block. Reject rows with an invalid label, mask, weight, group or time."""
        data = self.data
        labels_T, counts_T = zip(*(self._task(task, reader) for task in self.tasks.values()), strict=True)
        labels_BT = np.stack(labels_T, axis=1).astype(np.float32)
        weights_BT = groups_B = times_B = None
        if self.has_weights:
            samples_B = np.ones(len(labels_BT), np.float32)
            if data.weight:
                numbers_B, wrong_B = column_values.parse_numbers(reader.column(data.weight), data.missing)
                wrong_B |= ~(numbers_B >= 0)
                reader.reject(wrong_B, Reason.WEIGHT, data.weight, "a weight, a finite number of at least 0")
                samples_B = np.where(wrong_B, 0, numbers_B).astype(np.float32)
            weights_BT = np.stack(counts_T, axis=1) * samples_B[:, None]
        if data.group:
            groups_B = reader.hashes(data.group, "data.group", Reason.GROUP, "the group of the sample")
        if data.time_column:
            times_B = reader.event_times(data.time_column)
        return Targets(labels_BT, weights_BT, groups_B, times_B)

    def _task(self, task: TaskSection, reader: ColumnReader) -> tuple[npt.NDArray[Any], Mask]:
        known = (self.data.positive_labels, self.data.negative_labels)
        label_texts = " or ".join(map(repr, chain(*known)))
        counts_B = np.ones(len(reader.valid_B), np.bool_)
        if task.mask:
            mask_B, wrong_B = column_values.parse_labels(reader.column(task.mask), *known)
            reader.reject(wrong_B, Reason.LABEL, task.mask, label_texts)
            counts_B = mask_B == 1
        labels_B: npt.NDArray[Any]
        if task.is_item_label:
            return np.ones(len(counts_B)), counts_B
        if task.kind in ("binary", "retrieval"):
            labels_B, wrong_B = column_values.parse_labels(reader.column(task.label), *known)
            reason, expected = Reason.LABEL, label_texts
        else:
            labels_B, wrong_B = column_values.parse_numbers(reader.column(task.label), self.data.missing)
            wrong_B |= np.isnan(labels_B)
            reason, expected = Reason.TARGET, "a finite number"
        if task.kind == "classes":
            wrong_B |= (labels_B < 0) | (labels_B >= task.classes) | (labels_B != np.floor(labels_B))
            expected = f"a class from 0 to {task.classes - 1}"
        # The label of a masked sample is often unknown.
        reader.reject(wrong_B & counts_B, reason, task.label, expected)
        if task.kind == "retrieval":  # only choices count
            counts_B = counts_B & (labels_B == 1)
        return np.where(wrong_B, 0, labels_B), counts_B
