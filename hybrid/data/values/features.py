"""The columns of data.sparse out of those of the files, each by its kind; what is wrong in a row is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config.resolved_columns import Column
from hybrid.data.values import dates, weighted_ids
from hybrid.data.values.column_values import MAX_VALUE_BYTES, Values, cut, is_list, numbers, values
from hybrid.data.values.crosses import crossed
from hybrid.data.values.invalid_rows import Reason, Reject


class Feature(NamedTuple):
    """A column of data.sparse of B rows.

    Attributes:
        values: as in :class:`hybrid.data.parse.sources.RawBlock`.
        weights: array of B lists of float32, where its ids have weights.
    """

    values: Any
    weights: Any = None


def feature(column: Column, table: Mapping[str, Any], missing: tuple[str, ...], reject: Reject) -> Feature:
    """A column, bad rows included.

    Args:
        table: the columns of the file.
        missing: texts that mean missing.

    Raises:
        ArrowException: a column of the file is of a type of which it cannot be made.
    """
    match column.kind:
        case "buckets":
            numbers_B, wrong_B = numbers(table[column.source], missing)
            reject(wrong_B, Reason.NUMBER, column.source, "a finite number")
            return Feature(_nullable(numbers_B))
        case "hour" | "weekday":
            numbers_B, wrong_B = dates.parts_of_dates(table[column.source], missing, column.kind)
            reject(wrong_B, Reason.DATE, column.source, dates.EXPECTED)
            return Feature(_nullable(numbers_B))
        case "cross":
            return Feature(crossed([_one_value(table, source, missing, reject) for source in column.sources]))
        case "weighted":
            return _weighted(column, table[column.source], missing, reject)
        case _:
            found = values(table[column.source], missing, column.separator)
            _reject_values(found, column.source, reject)
            return _limited(column, Feature(found.coded), reject)


def _nullable(numbers_B: npt.NDArray[np.float64]) -> Any:
    return pa.array(numbers_B, mask=np.isnan(numbers_B))


def _one_value(table: Mapping[str, Any], name: str, missing: tuple[str, ...], reject: Reject) -> Any:
    if is_list(table[name]):
        raise pa.ArrowTypeError(f"column {name} holds {table[name].type}, of which there is no cross")
    found = values(table[name], missing)
    _reject_values(found, name, reject)
    return found.coded


def _weighted(column: Column, given: Any, missing: tuple[str, ...], reject: Reject) -> Feature:
    found = weighted_ids.weighted(given, missing, column.separator, column.weight_separator)
    _reject_values(found.values, column.source, reject)
    reject(found.wrong_B, Reason.ID_WEIGHT, column.source, weighted_ids.EXPECTED)
    return _limited(column, Feature(found.values.coded, found.weights), reject)


def _reject_values(found: Values, name: str, reject: Reject) -> None:
    reject(found.inexact_B, Reason.INEXACT, name, "an id that a float holds exactly")
    reject(found.too_long_B, Reason.LONG, name, f"at most {MAX_VALUE_BYTES:,} bytes")


def _limited(column: Column, made: Feature, reject: Reject) -> Feature:
    """``made`` with no more than ``max_ids`` ids a row, where there is such a limit."""
    if not column.max_ids or not is_list(made.values):
        return made
    if column.too_many_ids == "invalid_row":
        is_over_B = np.diff(np.asarray(made.values.offsets)) > column.max_ids
        reject(is_over_B, Reason.MANY, column.source, f"at most {column.max_ids} ids")
        return made
    from_start = column.too_many_ids == "keep_first"
    lists = [cut(each, column.max_ids, from_start=from_start) for each in made if each is not None]
    return Feature(*lists)
