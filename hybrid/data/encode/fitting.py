"""Statistics of the columns of data.sparse, fitted on the training rows, and the encodings that they give."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.config import TableSection
from hybrid.config.resolved_columns import Column
from hybrid.config.validation import table_of_column
from hybrid.data.encode.sparse_encoding import SparseEncoding
from hybrid.data.encode.vocabulary import Vocabulary
from hybrid.data.parse.column_layout import Layout
from hybrid.data.values import dates
from hybrid.data.values.column_values import is_list
from hybrid.data.values.scaling import Moments, Quantiles


class ValueCounts(NamedTuple):
    """The counts of D values: an array of texts, and int64 (D,). A value may occur twice among them."""

    values: pa.Array
    counts_D: npt.NDArray[np.int64]

    @classmethod
    def of(cls, column: pa.Array) -> ValueCounts:
        """Count the values of a categorical column of a ``RawBlock``."""
        flat = column.flatten() if is_list(column) else column
        return cls(flat.dictionary, np.bincount(flat.indices.drop_null(), minlength=len(flat.dictionary)))


class RankedValues(NamedTuple):
    """Distinct values, the most frequent first, by text among equals, and the count of each.

    Attributes:
        values: array of V texts.
        counts_V: int64, all positive.
    """

    values: pa.Array
    counts_V: npt.NDArray[np.int64]

    def count_known(self, min_count: int) -> int:
        """Return how many values occur at least ``min_count`` times."""
        return bisect_right(self.counts_V, -min_count, key=lambda count: -count)


@dataclass
class FittedStatistics:
    """Statistics of the training rows, besides vocabularies.

    Attributes:
        moments: of the dense columns.
        several_K: which columns of data.sparse hold several values in a row.
        quantiles_K: of the columns whose quantiles bound buckets; empty for the others.
    """

    moments: Moments
    several_K: npt.NDArray[np.bool_]
    quantiles_K: list[Quantiles]

    @classmethod
    def of(cls, layout: Layout) -> FittedStatistics:
        """Return the statistics of no rows."""
        moments = Moments.of(np.empty((0, len(layout.dense))), ())
        return cls(moments, np.zeros(len(layout.sparse), np.bool_), [Quantiles() for _ in layout.sparse])


def vocabularies(columns: Sequence[Column], tables: Mapping[str, TableSection]) -> dict[str, list[int]]:
    """Return the indices of the columns of each vocabulary.

    Columns that share a table share its vocabulary, so a value has the same row for each of them.
    """
    table_of = table_of_column(tables)
    groups: dict[str, list[int]] = {}
    for k, column in enumerate(columns):
        if column.kind in ("value", "weighted") and column.vocabulary == "build":
            groups.setdefault(table_of.get(column.name, column.name), []).append(k)
    return groups


def bucketed_numbers(column: Column, values: pa.Array) -> npt.NDArray[np.float64]:
    """Return the numbers whose quantiles bound the buckets of a column; none for other columns."""
    if column.kind == "buckets" and column.quantiles:
        return np.asarray(values.drop_null())
    return np.empty(0)


def holds_several(column: pa.Array) -> bool:
    """Return whether a row of a column of a ``RawBlock`` has more than one value."""
    return is_list(column) and bool((np.diff(np.asarray(column.offsets)) > 1).any())


def rank(counts: Sequence[ValueCounts]) -> tuple[RankedValues, list[npt.NDArray[np.int64]]]:
    """Rank values that were counted apart.

    Returns:
        The ranked values; for each count, the rank of each value: from 1, or 0 if it never occurs.
    """
    if not counts:
        return RankedValues(pa.array([], pa.large_string()), np.empty(0, np.int64)), []
    coded = pa.concat_arrays([each.values.cast(pa.large_string()) for each in counts]).dictionary_encode()
    index_D = np.asarray(coded.indices.fill_null(0))
    num_values = max(1, len(coded.dictionary))
    # Sums of integers below 2**53 are exact in float64.
    counts_D = np.concatenate([each.counts_D for each in counts])
    counts_U = np.bincount(index_D, weights=counts_D, minlength=num_values).astype(np.int64)
    known = np.flatnonzero(counts_U)
    table = pa.table({"value": coded.dictionary.take(pa.array(known)), "count": counts_U[known]})
    order = pc.sort_indices(table, [("count", "descending"), ("value", "ascending")])
    table = table.take(order)
    rank_U = np.zeros(num_values, np.int64)
    rank_U[known[np.asarray(order)]] = np.arange(1, 1 + len(known))
    ends = np.cumsum([len(each.values) for each in counts])[:-1]
    ranked = RankedValues(table["value"].combine_chunks(), np.asarray(table["count"]))
    return ranked, np.split(rank_U[index_D], ends)


def fitted_encoding(
    column: Column, ranked: RankedValues | None, quantiles: Quantiles, *, multi_hot: bool
) -> SparseEncoding:
    """Return the encoding of a column of data.sparse.

    Args:
        ranked: the values of all columns that share its vocabulary; None if it has no vocabulary.
        quantiles: of its numbers, if they bound its buckets.
        multi_hot: whether a training row has several values.
    """
    weighted = column.kind == "weighted"
    is_bag = column.kind != "cross" and (multi_hot or weighted)
    if ranked is not None:
        known = ranked.count_known(column.min_count)
        # Without one of its rows, a value that occurs min_count times is unknown.
        unknown_alone = int(ranked.counts_V[ranked.count_known(column.min_count + 1) :].sum())
        return SparseEncoding(
            column.name,
            "build",
            1 + known,
            is_bag,
            Vocabulary(ranked.values.slice(0, known)),
            unknown_alone / max(1, int(ranked.counts_V.sum())),
            weighted=weighted,
        )
    if column.kind in ("buckets", "hour", "weekday"):
        bounds = dates.BOUNDS.get(column.kind, column.bounds)
        if column.kind == "buckets" and column.quantiles:
            bounds = quantiles.bounds(column.quantiles)
        return SparseEncoding(column.name, "buckets", 2 + len(bounds), bounds=bounds)
    return SparseEncoding(column.name, "hash", column.hash_rows, is_bag, weighted=weighted)
