"""Statistics of the training rows, block by block, and the encoder that is fitted on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import TableSection
from hybrid.config.data_sections import DEFAULT_HASH_ROWS, GROW, Column
from hybrid.config.validation import table_of_column
from hybrid.data.encode.feature_encoder import (
    DenseEncoding,
    FeatureEncoder,
    SparseEncoding,
    transform_columns,
)
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.column_values import DATE_BOUNDS, is_list
from hybrid.data.values.vocabulary import Vocabulary
from hybrid.errors import DataError

MAX_KEPT = 1 << 20


class Moments(NamedTuple):
    """Mean, deviation and range of F transformed columns; NaN is ignored."""

    num_rows: int  # number of rows, including NaN
    count_F: npt.NDArray[np.number[Any]]  # numbers that are not NaN, or their weight
    mean_F: npt.NDArray[np.float64]  # mean of these numbers
    squares_F: npt.NDArray[np.float64]  # sum of the squared differences from the mean
    # lowest_F, highest_F: smallest and largest number.
    lowest_F: npt.NDArray[np.float64]
    highest_F: npt.NDArray[np.float64]

    @classmethod
    def of(cls, dense_BF: npt.NDArray[np.float64], transforms: Sequence[str]) -> Moments:
        """Apply the transform of each column to B rows, and return the moments of the results."""
        dense_BF = transform_columns(dense_BF, transforms)
        given_BF = ~np.isnan(dense_BF)
        count_F = given_BF.sum(0)
        mean_F = np.where(given_BF, dense_BF, 0.0).sum(0) / np.maximum(count_F, 1)
        squares_F = (np.where(given_BF, dense_BF - mean_F, 0.0) ** 2).sum(0)
        lowest_F = np.fmin.reduce(dense_BF, initial=np.inf)
        highest_F = np.fmax.reduce(dense_BF, initial=-np.inf)
        return cls(len(dense_BF), count_F, mean_F, squares_F, lowest_F, highest_F)

    def average_with(
        self, before: Sequence[DenseEncoding], columns: Sequence[Column], weight: float
    ) -> Moments:
        """Average ``self``, by ``weight``, with the moments of the encodings ``before``, by 1 - ``weight``.

        A column without numbers in ``self`` keeps its scaling in ``before``. A column whose earlier numbers
        were missing or equal takes the moments of ``self``. The range of other columns covers both ranges.
        """
        shift_F, scale_F, missing_F = (
            np.array([(e.shift, e.scale, e.missing) for e in before]).reshape(-1, 3).T
        )
        is_range_F = np.array([column.scaling.name == "min_max" for column in columns], np.bool_)
        # The inverse of encodings(), in which a constant column has a scale of its own.
        varies_F = np.where(is_range_F, missing_F > 0, scale_F != np.maximum(np.abs(shift_F), 1.0))
        count_F = np.where(self.count_F > 0, varies_F * self.count_F * (1 - weight) / weight, 1.0)
        deviation_F = np.where(varies_F, scale_F, 0.0)
        earlier = Moments(
            0,
            count_F,
            shift_F + missing_F * scale_F,
            count_F * deviation_F**2,
            np.where(count_F > 0, shift_F, np.inf),
            np.where(count_F > 0, shift_F + deviation_F, -np.inf),
        )
        return earlier.plus(self)

    def plus(self, block: Moments) -> Moments:
        """Return the moments of the rows of both blocks (Chan et al., 1979)."""
        total_F = np.maximum(self.count_F + block.count_F, 1)
        delta_F = block.mean_F - self.mean_F
        return Moments(
            self.num_rows + block.num_rows,
            self.count_F + block.count_F,
            self.mean_F + delta_F * block.count_F / total_F,
            self.squares_F + (block.squares_F + delta_F**2 * self.count_F * block.count_F / total_F),
            np.minimum(self.lowest_F, block.lowest_F),
            np.maximum(self.highest_F, block.highest_F),
        )

    def encodings(self, columns: Sequence[Column]) -> tuple[DenseEncoding, ...]:
        """Return the encoding of each column; a fitted scaling turns a constant column into zeros."""
        deviation_F = np.sqrt(self.squares_F / np.maximum(self.count_F, 1))
        constant_F = deviation_F <= 1e-12 * np.abs(self.mean_F)
        # Only constant columns have this scale, by which average_with() recognizes them.
        scale_F = np.maximum(np.abs(self.mean_F), 1.0)
        deviation_F[deviation_F == scale_F] *= 1 + np.finfo(np.float64).eps
        deviation_F[constant_F] = scale_F[constant_F]
        encodings = []
        values = (each.tolist() for each in (self.mean_F, deviation_F, self.lowest_F, self.highest_F))
        for column, mean, deviation, lowest, highest in zip(columns, *values, strict=True):
            shift, scale, missing = 0.0, 1.0, 0.0
            if column.scaling.name == "standardize":
                shift, scale = mean, deviation
            elif column.scaling.name == "min_max" and lowest <= highest:
                shift = lowest
                if lowest < highest:
                    scale = highest - lowest
                    missing = (mean - lowest) / scale
            elif column.scaling.name == "given":
                shift, scale = column.scaling["mean"], column.scaling["std"]
            encodings.append(DenseEncoding(column.name, shift, scale, missing, column.transform))
        return tuple(encodings)


class Quantiles(NamedTuple):
    """A sample of a column from which quantiles are computed, in bounded memory.

    Up to ``MAX_KEPT`` numbers are kept. More numbers are replaced by ``MAX_KEPT / 2`` of them, at evenly
    spaced ranks. After N numbers, the rank of a quantile is then wrong by at most N * (N / MAX_KEPT ** 2),
    which is 0.1 % of N for a billion numbers.
    """

    values: npt.NDArray[np.float64]  # without NaN
    weights: npt.NDArray[np.float64]  # the number of numbers that each value stands for

    @classmethod
    def of(cls, numbers: npt.NDArray[np.float64]) -> Quantiles:
        return cls(numbers, np.ones(len(numbers)))

    def plus(self, block: Quantiles) -> Quantiles:
        kept = Quantiles(np.append(self.values, block.values), np.append(self.weights, block.weights))
        if len(kept.values) <= MAX_KEPT:
            return kept
        half = MAX_KEPT // 2
        values, ends = kept._sort()
        step = ends[-1] / half
        index = ends.searchsorted((np.arange(half) + 0.5) * step, side="right")
        return Quantiles(values[index], np.full(half, step))

    def bounds(self, buckets: int) -> tuple[float, ...]:
        """Return the bounds of ``buckets`` equally full buckets; fewer if numbers are equal or missing."""
        if not len(self.values):
            return ()
        values, ends = self._sort()
        ranks = ends[-1] * np.arange(1, buckets) / buckets
        bounds = np.unique(values[ends.searchsorted(ranks, side="right")])
        return tuple(bounds[bounds > values[0]].tolist())

    def _sort(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        order = self.values.argsort(kind="stable")  # the same order on every processor
        return self.values[order], self.weights[order].cumsum()


class ValueCounts(NamedTuple):
    """D texts, and int64 (D,), the number of times that each text occurs.

    A result of :func:`rank` has distinct texts with counts above 0, sorted by descending count, then by text.
    """

    values: pa.Array
    counts_D: npt.NDArray[np.int64]

    @classmethod
    def of(cls, column: pa.Array) -> ValueCounts:
        """Count each text in the dictionary of a column; texts may repeat, and unused texts count 0."""
        flat = column.flatten() if is_list(column) else column
        return cls(flat.dictionary, np.bincount(flat.indices.drop_null(), minlength=len(flat.dictionary)))


class FittedStatistics(NamedTuple):
    """Statistics of training rows, to fit an encoder; :class:`ValueCounts` has the counts of values."""

    moments: Moments
    several_K: npt.NDArray[np.bool_]  # whether a row of a column of data.sparse has several values
    quantiles_K: Sequence[Quantiles]  # of the columns with quantile buckets; without numbers for others

    @classmethod
    def empty(cls, layout: Layout) -> FittedStatistics:
        num_sparse = len(layout.sparse)
        moments = Moments.of(np.empty((0, len(layout.dense))), ())
        return cls(moments, np.zeros(num_sparse, np.bool_), [Quantiles.of(np.empty(0))] * num_sparse)

    @classmethod
    def of_all(cls, blocks: Iterable[RawBlock], layout: Layout) -> FittedStatistics:
        statistics = cls.empty(layout)
        for block in blocks:
            statistics = statistics.plus(cls.of(block, layout))
        return statistics

    @classmethod
    def of(cls, block: RawBlock, layout: Layout) -> FittedStatistics:
        several = [is_list(each) and (np.diff(np.asarray(each.offsets)) > 1).any() for each in block.sparse]
        numbers = [
            np.asarray(values.drop_null()) if "buckets" in column.arguments else np.empty(0)
            for column, values in zip(layout.sparse, block.sparse, strict=True)
        ]
        moments = Moments.of(block.dense_BF, [column.transform for column in layout.dense])
        return cls(moments, np.array(several, np.bool_), [*map(Quantiles.of, numbers)])

    def plus(self, block: FittedStatistics) -> FittedStatistics:
        pairs = zip(self.quantiles_K, block.quantiles_K, strict=True)
        return FittedStatistics(
            self.moments.plus(block.moments),
            self.several_K | block.several_K,
            [before.plus(after) for before, after in pairs],
        )


def group_by_vocabulary(
    columns: Sequence[Column], tables: Mapping[str, TableSection]
) -> dict[str, list[int]]:
    """Return the indices of the columns with a vocabulary, by the name of their table.

    Columns of a table share its vocabulary. A column in no section [tables.NAME] has a table of its name.
    """
    table_of = table_of_column(tables)
    groups: dict[str, list[int]] = {}
    for k, column in enumerate(columns):
        if column.has_vocabulary:
            groups.setdefault(table_of.get(column.name, column.name), []).append(k)
    return groups


def rank(counts: Sequence[ValueCounts]) -> ValueCounts:
    """Add up the counts of several blocks or columns, and sort the values that occur by their count."""
    if not counts:
        return ValueCounts(pa.array([], pa.large_string()), np.empty(0, np.int64))
    coded = pa.concat_arrays([each.values.cast(pa.large_string()) for each in counts]).dictionary_encode()
    index_D = np.asarray(coded.indices.fill_null(0))
    # Sums of integers below 2**53 are exact in float64.
    counts_D = np.concatenate([each.counts_D for each in counts])
    num_values = len(coded.dictionary)
    counts_U = np.bincount(index_D, weights=counts_D, minlength=num_values).astype(np.int64)
    known = np.flatnonzero(counts_U)
    table = pa.table({"value": coded.dictionary.take(pa.array(known)), "count": counts_U[known]})
    table = table.sort_by([("count", "descending"), ("value", "ascending")])
    return ValueCounts(table["value"].combine_chunks(), np.asarray(table["count"]))


def fit_encoder(
    layout: Layout,
    tables: Mapping[str, TableSection],
    statistics: FittedStatistics,
    ranked: Mapping[str, ValueCounts],
) -> FeatureEncoder:
    """Return an encoder that is fitted on training rows; raise DataError if there are no rows.

    ``ranked`` are results of :func:`rank` by name of :func:`group_by_vocabulary`.
    """
    if not statistics.moments.num_rows:
        raise DataError("no row is left to train on; check data.path, data.split and data.validation")
    of_column = {
        k: ranked[name] for name, ks in group_by_vocabulary(layout.sparse, tables).items() for k in ks
    }
    sparse = []
    for k, column in enumerate(layout.sparse):
        is_weighted = column.kind == "weighted"
        has_several = column.has_several or bool(statistics.several_K[k])
        is_bag = is_weighted or (has_several and column.kind != "cross")
        encoding = SparseEncoding(column.name, GROW, 0, is_bag, weighted=is_weighted)
        if k in of_column:
            values, min_count = of_column[k], column.vocabulary["min_count"]
            known = int((values.counts_D >= min_count).sum())  # ranked first
            # The leave-one-out estimate of UnknownValues: without one of its min_count rows, a value is
            # unknown.
            unknown_alone = int(values.counts_D[values.counts_D <= min_count].sum())
            encoding = replace(
                encoding,
                vocabulary="build",
                num_rows=1 + known,
                values=Vocabulary(values.values.slice(0, known)),
                expected_unknown=unknown_alone / max(1, int(values.counts_D.sum())),
            )
        elif column.kind in ("buckets", "hour", "weekday"):
            bounds = column.arguments.get("bounds", DATE_BOUNDS.get(column.kind, ()))
            if "buckets" in column.arguments:
                bounds = statistics.quantiles_K[k].bounds(column.arguments["buckets"])
            encoding = SparseEncoding(column.name, "buckets", 2 + len(bounds), bounds=bounds)
        elif column.vocabulary.name != GROW:
            num_rows = column.vocabulary.arguments.get("rows", DEFAULT_HASH_ROWS)
            encoding = replace(encoding, vocabulary="hash", num_rows=num_rows)
        sparse.append(encoding)
    return FeatureEncoder(statistics.moments.encodings(layout.dense), tuple(sparse))
