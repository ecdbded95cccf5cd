"""What is learnt of the columns of data.sparse from the training rows."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import numpy as np

from hybrid.config.columns import Column
from hybrid.data import dates
from hybrid.data.buckets import Quantiles
from hybrid.data.columns import is_list
from hybrid.data.sparse_encoding import SparseEncoding


class Fitter(Protocol):
    """What learns the encoding of one column of data.sparse from the training rows."""

    def add(self, column: Any) -> None:
        """Add a column as in ``RawBlock``."""
        ...

    def encoding(self) -> SparseEncoding:
        """What was learnt."""
        ...


def fitter_of(column: Column) -> Fitter:
    """What learns a column of its kind."""
    match column.kind:
        case "buckets" if column.quantiles:
            return _Ranker(column)
        case "buckets":
            return _Known(_buckets(column.name, column.bounds))
        case "hour" | "weekday":
            return _Known(_buckets(column.name, dates.BOUNDS[column.kind]))
        case "cross":
            return _Known(SparseEncoding(column.name, "hash", column.hash_rows))
        case _:
            return _ValueCounter(column)


def _buckets(name: str, bounds: tuple[float, ...]) -> SparseEncoding:
    return SparseEncoding(name, "buckets", 2 + len(bounds), bounds=bounds)


class _Known:
    """Of a column whose encoding does not depend on the rows."""

    def __init__(self, encoding: SparseEncoding) -> None:
        self._encoding = encoding

    def add(self, column: Any) -> None:
        pass

    def encoding(self) -> SparseEncoding:
        return self._encoding


class _Ranker:
    """Finds the bounds of buckets that hold equally many training rows."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._quantiles = Quantiles()

    def add(self, column: Any) -> None:
        self._quantiles.add(np.asarray(column.drop_null()))

    def encoding(self) -> SparseEncoding:
        return _buckets(self._column.name, self._quantiles.bounds(self._column.quantiles))


class _ValueCounter:
    """Counts the values of one categorical column."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._counts: Counter[str] = Counter()
        self._multi_hot = column.kind == "weighted"

    def add(self, column: Any) -> None:
        if is_list(column):
            self._multi_hot |= bool((np.diff(np.asarray(column.offsets)) > 1).any())
            column = column.flatten()
        if self._column.vocabulary == "build":
            counts_D = np.bincount(column.indices.drop_null(), minlength=len(column.dictionary))
            for value, count in zip(column.dictionary.to_pylist(), counts_D.tolist(), strict=True):
                if count:
                    self._counts[value] += count

    def encoding(self) -> SparseEncoding:
        of, weighted = self._column, self._column.kind == "weighted"
        if of.vocabulary == "hash":
            return SparseEncoding(of.name, "hash", of.hash_rows, self._multi_hot, weighted=weighted)
        values = tuple(v for _, v in sorted((-n, v) for v, n in self._counts.items() if n >= of.min_count))
        known_by_itself = sum(n for n in self._counts.values() if n <= of.min_count)
        unknown = known_by_itself / max(1, self._counts.total())
        return SparseEncoding(
            of.name, "build", 1 + len(values), self._multi_hot, values, unknown, weighted=weighted
        )
