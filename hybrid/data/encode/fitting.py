"""What is learnt of the columns of data.sparse from the training rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from hybrid.data.values.buckets import Quantiles
from hybrid.data.values.column_values import is_list
from hybrid.data.values.scaling import Moments

_VALUES = ("value", "weighted")


class WordCounts(NamedTuple):
    """How often each of D words comes: an array of texts, and int64 (D,). A word may be there twice."""

    words: Any
    counts_D: npt.NDArray[np.int64]

    @classmethod
    def of(cls, column: Any) -> WordCounts:
        """Those of a categorical column as in ``RawBlock``."""
        flat = column.flatten() if is_list(column) else column
        return cls(flat.dictionary, np.bincount(flat.indices.drop_null(), minlength=len(flat.dictionary)))


class Ranked(NamedTuple):
    """Distinct words, the most frequent first, by text among equals; and how often each comes.

    Attributes:
        words: array of V texts.
        counts_V: int64, none of which is 0.
    """

    words: Any
    counts_V: npt.NDArray[np.int64]

    def num_known(self, min_count: int) -> int:
        """How many of the words come at least so often."""
        return bisect_right(self.counts_V, -min_count, key=lambda count: -count)


@dataclass
class Learnt:
    """What is learnt of the training rows beside vocabularies.

    Attributes:
        moments: of the dense columns.
        several_K: which of the columns of data.sparse hold several values in a row.
        quantiles_K: of those that go into buckets by them; of the others nothing.
    """

    moments: Moments
    several_K: npt.NDArray[np.bool_]
    quantiles_K: list[Quantiles]

    @classmethod
    def of(cls, layout: Layout) -> Learnt:
        """Of no rows."""
        num_sparse = len(layout.sparse)
        quantiles = [Quantiles() for _ in range(num_sparse)]
        return cls(Moments(layout.dense), np.zeros(num_sparse, np.bool_), quantiles)


def vocabularies(columns: Sequence[Column], tables: Mapping[str, TableSection]) -> dict[str, list[int]]:
    """The columns that have each vocabulary, by their places: those that share a table share it, so that a
    value is the same row for each."""
    table_of = table_of_column(tables)
    groups: dict[str, list[int]] = {}
    for k, column in enumerate(columns):
        if column.kind in _VALUES and column.vocabulary == "build":
            groups.setdefault(table_of.get(column.name, column.name), []).append(k)
    return groups


def numbers_of(column: Column, given: Any) -> npt.NDArray[np.float64]:
    """The numbers whose quantiles make buckets; none of a column that has no such."""
    if column.kind == "buckets" and column.quantiles:
        return np.asarray(given.drop_null())
    return np.empty(0)


def holds_several(column: Any) -> bool:
    """Whether a row of a column as in ``RawBlock`` has more than one value."""
    return is_list(column) and bool((np.diff(np.asarray(column.offsets)) > 1).any())


def ranked(parts: Sequence[WordCounts]) -> tuple[Ranked, list[npt.NDArray[np.int64]]]:
    """Words that were counted apart, together; and by part the rank of each: from 1, 0 if it never comes."""
    if not parts:
        return Ranked(pa.array([], pa.large_string()), np.empty(0, np.int64)), []
    coded = pa.concat_arrays([part.words.cast(pa.large_string()) for part in parts]).dictionary_encode()
    place_D = np.asarray(coded.indices.fill_null(0))
    num_words = max(1, len(coded.dictionary))
    # Sums of integers below 2**53 are exact in float64.
    counts = np.concatenate([part.counts_D for part in parts])
    counts_U = np.bincount(place_D, weights=counts, minlength=num_words).astype(np.int64)
    known = np.flatnonzero(counts_U)
    table = pa.table({"word": coded.dictionary.take(pa.array(known)), "count": counts_U[known]})
    order = pc.sort_indices(table, [("count", "descending"), ("word", "ascending")])
    table = table.take(order)
    rank_U = np.zeros(num_words, np.int64)
    rank_U[known[np.asarray(order)]] = np.arange(1, 1 + len(known))
    ends = np.cumsum([len(part.words) for part in parts])[:-1]
    return Ranked(table["word"].combine_chunks(), np.asarray(table["count"])), np.split(rank_U[place_D], ends)


def value_encoding(column: Column, found: Ranked, *, multi_hot: bool) -> SparseEncoding:
    """The encoding of a column of values, out of the words of all columns that share its vocabulary."""
    known = found.num_known(column.min_count)
    by_itself = int(found.counts_V[found.num_known(column.min_count + 1) :].sum())
    return SparseEncoding(
        column.name,
        "build",
        1 + known,
        multi_hot or column.kind == "weighted",
        Vocabulary(found.words.slice(0, known)),
        by_itself / max(1, int(found.counts_V.sum())),
        weighted=column.kind == "weighted",
    )


def other_encoding(column: Column, quantiles: Quantiles, *, multi_hot: bool) -> SparseEncoding:
    """The encoding of a column that has no vocabulary.

    Args:
        quantiles: of its numbers, where it goes by them.
    """
    match column.kind:
        case "buckets":
            by_rank = column.quantiles
            return _buckets(column.name, quantiles.bounds(by_rank) if by_rank else column.bounds)
        case "hour" | "weekday":
            return _buckets(column.name, dates.BOUNDS[column.kind])
        case "cross":
            return SparseEncoding(column.name, "hash", column.hash_rows)
        case _:
            weighted = column.kind == "weighted"
            return SparseEncoding(
                column.name, "hash", column.hash_rows, multi_hot or weighted, weighted=weighted
            )


def _buckets(name: str, bounds: tuple[float, ...]) -> SparseEncoding:
    return SparseEncoding(name, "buckets", 2 + len(bounds), bounds=bounds)
