"""The stages of a preparation. A stage processes a segment, or a piece (some blocks of a segment).

::

    parse_segment  a segment of a file ──> pieces: numbers, and codes into the piece's distinct values
    hold_out       all training pieces ──> the rule that selects the rows of each split
    fit_piece      a piece             ──> counts of each value in training rows; moments; quantiles
    rank_values    all pieces          ──> a vocabulary: the values by descending count
    encode_piece   a piece             ──> its samples, at their position in the arrays of the splits

The result of a stage depends on the files and the configuration alone, not on the threads that run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import RunConfig
from hybrid.config.data_sections import TEST, TRAIN, Holdout
from hybrid.data.dataset.prepared_dataset import LabelSums, SplitPosition, SplitWriter
from hybrid.data.encode.feature_encoder import FeatureEncoder, SparseEncoding, count_unknown
from hybrid.data.encode.fitting import Moments, ValueCounts, bucketed_numbers, has_several_values, rank
from hybrid.data.parse import sources
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import RawBlock, Segment, SplitValues
from hybrid.data.prepare import spill
from hybrid.data.prepare.spill import BlockLog, SegmentLog
from hybrid.data.values.column_values import is_list
from hybrid.data.values.vocabulary import HASHED_AT_ONCE, text_bounds
from hybrid.errors import DataError
from hybrid.primitives.available_memory import available_memory_bytes
from hybrid.primitives.splitmix64 import next_of

MAX_SAMPLED = 1 << 20  # number of times in memory, to find the last training row
# Measured bytes of memory: for ranking, per value and per byte of text; for finding values by hash, per
# value, and per byte of text in one block.
_RANKED_VALUE, _RANKED_BYTE, _HASHED_VALUE, _HASHED_BYTE = 220, 4, 60, 32
RANKED_AT_ONCE = 1 << 16  # values of pieces are added up when there are so many, or as many as are known


@dataclass(frozen=True)
class Split:
    """The rule that selects the rows of a split."""

    held: Holdout  # the split, and its keys in the configuration
    seed: int  # the seed of random rows, and of sampled times
    # For ``held.by = "time"``, the time of the last row that is not held out. If there are more than
    # ``MAX_SAMPLED`` rows, this is an estimate from a random sample.
    latest: float = 0.0

    def find_latest(self, blocks: Iterable[RawBlock]) -> float:
        """Return the time of the last row in ``blocks`` that is not held out by this split."""
        times, hashes, limit = np.empty(0), np.empty(0, np.uint64), 2**64 - 1
        for block in blocks:
            times = np.append(times, block.held_out_by[self.held.split])
            hashes = np.append(hashes, self._hash(block.source_rows_B))
            keep = hashes <= np.uint64(limit)
            while keep.sum() > MAX_SAMPLED:
                limit //= 2
                keep = hashes <= np.uint64(limit)
            times, hashes = times[keep], hashes[keep]
        fraction = 1 - self.held.fraction
        return float(np.quantile(times, fraction, method="inverted_cdf")) if len(times) else 0.0

    def selects(self, block: RawBlock) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows of a block that belong to the split."""
        if self.held.by == "time":
            is_later: npt.NDArray[np.bool_] = block.held_out_by[self.held.split] > self.latest
            return is_later
        is_random = self.held.by == "random"
        hashed_B = self._hash(block.source_rows_B if is_random else block.held_out_by[self.held.split])
        is_below: npt.NDArray[np.bool_] = hashed_B < np.uint64(self.held.fraction * 2**64)
        return is_below

    def _hash(self, values_B: SplitValues) -> npt.NDArray[np.uint64]:
        key = next_of(np.array([self.seed % 2**64], np.uint64))
        return next_of(values_B.astype(np.int64).view(np.uint64) ^ key)


def parse_segment(
    segment: Segment, folder: Path, layout: Layout, advance: Callable[[int], None]
) -> SegmentLog:
    """Parse a segment into a new folder; ``advance`` gets the number of rows of each block."""
    folder.mkdir()
    log, held, row = SegmentLog([], []), list[RawBlock](), 0

    def write_held() -> None:
        first_row = int(held[0].source_rows_B[0])
        spill.write_piece(spill.piece_folder(folder, len(log.pieces)), held, first_row)
        log.pieces.append(first_row)
        held.clear()

    for table in sources.read_segment(segment, layout):
        block, invalid = sources.parse(segment.path, table, layout, row)
        log.blocks.append(BlockLog(table.num_rows, table.num_lines, len(block.source_rows_B), invalid))
        if len(block.source_rows_B):
            held.append(block)
        row += table.num_rows
        is_large = layout.data.format != "parquet" and len(held) >= sources.SEGMENT_BLOCKS
        if is_large or sum(len(each.source_rows_B) for each in held) >= sources.SEGMENT_ROWS:
            write_held()
        advance(table.num_rows)
    if held:
        write_held()
    return log


class Piece(NamedTuple):
    """Consecutive parsed blocks of a segment."""

    folder: Path
    first_row: int  # index of the first row over all files of the split
    split: str
    held_out: tuple[Split, ...] = ()  # the rules that select the rows of other splits

    def blocks(self, values: Sequence[pa.Array]) -> Iterator[tuple[str, RawBlock]]:
        """Yield the rows of each split, block by block; see :func:`spill.read_piece`."""
        for block in spill.read_piece(self.folder, self.first_row, values):
            for split in self.held_out:
                is_held_B = split.selects(block)
                if is_held_B.any():
                    yield split.held.split, block.select(is_held_B)
                    block = block.select(~is_held_B)
            yield self.split, block


def hold_out(config: RunConfig, pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces of the training files, whose rows are divided by data.split and data.validation."""
    divided = [*pieces]
    for held in config.data.holdouts:
        split = Split(held, config.run.seed if held.split == TEST else config.run.seed + 2**63)
        if held.by == "time":
            blocks = chain.from_iterable(piece.blocks(()) for piece in divided)
            latest = split.find_latest(rows for name, rows in blocks if name == TRAIN)
            split = replace(split, latest=latest)
        divided = [piece._replace(held_out=(*piece.held_out, split)) for piece in divided]
    return divided


class PieceStatistics(NamedTuple):
    """Statistics of a piece, besides the counts of its values."""

    moments: list[Moments]  # moments of the training rows of each block
    # For each block, the numbers of each column of data.sparse with quantile buckets.
    numbers: list[list[npt.NDArray[np.float64]]]
    several_K: npt.NDArray[np.bool_]  # whether a training row of a column has several values
    # For each split, the number of rows, and the number of values in each column of data.sparse.
    sizes: dict[str, SplitPosition]


def fit_piece(piece: Piece, layout: Layout) -> PieceStatistics:
    """Compute the statistics of a piece's training rows, and write the counts of values into the piece."""
    lengths = [len(values) for values in spill.read_values(piece.folder)]
    nothing = SplitPosition(0, np.zeros(len(lengths), np.int64))
    sizes = dict.fromkeys(layout.data.splits, nothing)
    counts: list[npt.NDArray[np.int64]] = [
        np.zeros(length * column.has_vocabulary, np.int64)
        for column, length in zip(layout.sparse, lengths, strict=True)
    ]
    statistics = PieceStatistics([], [], np.zeros(len(lengths), np.bool_), sizes)
    for split, rows in piece.blocks([pa.array(np.arange(length, dtype=np.int32)) for length in lengths]):
        num_rows, values_K = statistics.sizes[split]
        more = [len(c.flatten()) if is_list(c) else len(c) - c.null_count for c in rows.sparse]
        statistics.sizes[split] = SplitPosition(
            num_rows + len(rows.source_rows_B), values_K + np.array(more, np.int64)
        )
        if split != TRAIN:
            continue
        statistics.moments.append(Moments.of(rows.dense_BF, layout.transforms))
        pairs = zip(layout.sparse, rows.sparse, strict=True)
        statistics.numbers.append([bucketed_numbers(column, values) for column, values in pairs])
        for k, column in enumerate(rows.sparse):
            statistics.several_K[k] |= has_several_values(column)
            if counts[k].size:
                counts[k] += ValueCounts.of(column).counts_D
    for k, counts_D in enumerate(counts):
        np.save(spill.counts_path(piece.folder, k), counts_D)
    return statistics


def rank_values(
    columns: Mapping[int, str], pieces: Sequence[Piece], num_threads: int, check: Callable[[], None]
) -> ValueCounts:
    """Return the ranked values of columns that share a vocabulary; DataError if they do not fit into memory.

    Args:
        columns: the names of the columns, by their index in data.sparse.
        num_threads: number of threads that share the free memory.
        check: called for each piece; an exception from it ends the work.
    """
    ranked = rank([])
    waiting, size = list[ValueCounts](), 0
    for i, piece in enumerate(pieces, 1):
        check()
        values = spill.read_values(piece.folder)
        for k in columns:
            waiting.append(ValueCounts(values[k], np.load(spill.counts_path(piece.folder, k))))
            size += len(values[k])
        # A sum costs as much as its values. So the values double, or the sums would take most of the time.
        if i == len(pieces) or size > max(RANKED_AT_ONCE, len(ranked.values)):
            waiting.append(ranked)
            texts = [text_bounds(each.values) for each in waiting]
            num_bytes = sum(
                _RANKED_VALUE * len(each) + _RANKED_BYTE * int(each[-1] - each[0]) for each in texts
            )
            _require_memory(num_bytes, columns.values(), num_threads)
            ranked = rank(waiting)
            waiting, size = [], 0
    return ranked


def index_values(encoding: SparseEncoding, num_threads: int) -> None:
    """Make the index of a vocabulary once, before threads look up values; DataError if memory runs out."""
    if encoding.values is not None:
        texts = encoding.values.texts
        num_bytes = _HASHED_VALUE * len(texts)
        if len(texts):
            num_bytes += _HASHED_BYTE * texts.nbytes * min(HASHED_AT_ONCE, len(texts)) // len(texts)
        _require_memory(num_bytes, [encoding.name], num_threads)
        encoding.rows(pa.array([], pa.large_string()))


def _require_memory(num_bytes: int, names: Iterable[str], num_threads: int) -> None:
    """Raise DataError if less memory is free. Without this check, the system might kill the process."""
    if num_bytes * num_threads > available_memory_bytes():
        gib = num_bytes * num_threads / 2**30
        rule = "set data.vocabulary = hash or grow, which keep no values, or add memory"
        raise DataError(f"{', '.join(names)}: a vocabulary of so many values needs {gib:.1f} GiB; {rule}")


def encode_piece(
    piece: Piece,
    encoder: FeatureEncoder,
    positions: Mapping[str, SplitPosition],
    folder: Path,
) -> dict[str, tuple[list[LabelSums], npt.NDArray[np.int64]]]:
    """Write the samples of a piece.

    Args:
        positions: the position of the first sample of the piece in each split.

    Returns:
        For each split, the sums of labels by block, and the counts of :func:`count_unknown`.
    """
    unknown = {split: np.zeros((3, len(encoder.sparse)), np.int64) for split in positions}
    values = spill.read_values(piece.folder)
    # For each column, the table row of each distinct value.
    rows_of_values = [pa.array(each.rows(values[k])) for k, each in enumerate(encoder.sparse)]
    writers = {
        split: SplitWriter(folder / split, encoder.input_spec, start) for split, start in positions.items()
    }
    for split, rows in piece.blocks(rows_of_values):
        assert rows.targets is not None
        encoded = encoder.encode(rows)
        unknown[split] += count_unknown(encoder, rows, encoded)
        writers[split].append(encoded, rows.targets, rows.source_rows_B)
    return {split: (writer.label_sums, unknown[split]) for split, writer in writers.items()}
