"""Preparation of files: threads parse each segment of a file once. There is at most one thread for each core.

A stage processes a segment, or a piece (some blocks of a segment)::

    parse_segment  a segment of a file ──> pieces: numbers, and dictionary-encoded values
    hold_out       all training pieces ──> the rules that select test and validation rows
    fit_piece      a piece             ──> counts of each value in training rows; moments; quantiles
    rank_values    all pieces          ──> a vocabulary: the values by descending count
    encode_piece   a piece             ──> its samples, at their positions in the arrays of the splits

The result of a stage depends on the files and the configuration alone, not on the threads that run it.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.config import RunConfig
from hybrid.config.data_sections import JOINS, PATH_KEYS, TRAIN
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DatasetReport
from hybrid.data.dataset.prepared_dataset import LabelSums, Position, SplitWriter, label_reports
from hybrid.data.encode.feature_encoder import FeatureEncoder, SparseEncoding, count_unknown, report_unknown
from hybrid.data.encode.fitting import FittedStatistics, ValueCounts, fit_encoder, group_by_vocabulary, rank
from hybrid.data.parse import sources
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.input_files import InputFile
from hybrid.data.parse.side_tables import read_side_tables
from hybrid.data.parse.sources import RawBlock, Segment, split_files
from hybrid.data.prepare.spill import Piece, hold_out
from hybrid.data.values.column_values import is_list
from hybrid.data.values.invalid_rows import InvalidRow, InvalidRowLog, InvalidRowReport
from hybrid.data.values.vocabulary import HASHED_AT_ONCE
from hybrid.errors import DataError
from hybrid.primitives.available_memory import available_memory_bytes
from hybrid.primitives.progress import Progress
from hybrid.storage.remote_path import parse_path

Job = TypeVar("Job")
Result = TypeVar("Result")

_BYTES_PER_THREAD = 32 << 20  # a smaller input gets fewer threads
# Estimate of a thread's memory: 64 MiB of text, with up to 16 bytes for each byte of it.
_MEMORY_PER_THREAD = 1 << 30
# Measured bytes of memory: for ranking, per value and per byte of text; for finding values by hash, per
# value, and per byte of text in one block.
_RANKED_VALUE, _RANKED_BYTE, _HASHED_VALUE, _HASHED_BYTE = 220, 4, 60, 32
RANKED_AT_ONCE = 1 << 16  # pieces' values are added up when more wait than this, and than are ranked


class BlockLog(NamedTuple):
    """The number of rows in a block, and the invalid rows."""

    num_rows: int  # number of rows, invalid ones included
    num_lines: int  # lines of these rows in the file
    num_valid: int
    invalid: list[InvalidRow]  # the invalid rows, with their lines in the segment


@dataclass(eq=False)
class FilesPreparation:
    """Parses and encodes the rows of input files, and writes the arrays of all splits."""

    config: RunConfig  # the file format, and the rules for splits
    files: Mapping[str, Sequence[InputFile]]  # see hybrid.data.parse.input_files.find_input_files
    folder: Path  # folder of the splits
    report: Callable[[str], None]  # see hybrid.data.prepare.preparation.prepare

    def __post_init__(self) -> None:
        data = self.config.data
        layout = Layout.of(data, self.config.columns, self.config.tasks)
        side_files = [self.files[f"{JOINS}[{i}]"] for i in range(len(data.joins))]
        tables = read_side_tables(data, layout.required, side_files)
        self._layout = replace(layout, side_tables=tables)
        self._spill = self.folder / "segments"
        self._progress = Progress(self.report)
        self._fraction = 0.0  # completed fraction of the work
        self._should_stop = threading.Event()

    def write(self) -> tuple[FeatureEncoder, dict[str, DatasetReport]]:
        """Write all splits; return the encoder fitted on the training rows, and a report for each split.

        Raise ConfigError, DataError or StorageError if the files cannot be used.
        """
        segments = {
            split: split_files([parse_path(file.path) for file in self.files[split]], self._layout)
            for split in self.config.data.splits
        }
        size = sum(segment.size for segment in chain(*segments.values()))
        fit = available_memory_bytes() // 2 // _MEMORY_PER_THREAD
        cores = len(os.sched_getaffinity(0))
        self._num_threads = max(1, min(cores, size // _BYTES_PER_THREAD, fit))
        self._spill.mkdir(parents=True)
        groups = group_by_vocabulary(self._layout.sparse, self.config.tables)
        # Ordering values takes about as long as hashing other columns does in the last phase.
        ordering = 0.15 * sum(map(len, groups.values())) / max(1, len(self._layout.sparse))
        # Arrow and numpy release the interpreter's lock while they work, so threads use all cores.
        self._threads = ThreadPoolExecutor(self._num_threads, "prepare")
        try:
            pieces, invalid_rows = self._parse(segments)
            statistics, starts, ends = self._fit(pieces)
            rank_group = partial(self.rank_values, pieces)
            ranked = self._map("ordering values", ordering, rank_group, [*groups.values()])
            vocabularies = dict(zip(groups, ranked, strict=True))
            encoder = fit_encoder(self._layout, self.config.tables, statistics, vocabularies)
            jobs = [*zip(pieces, starts, strict=True)]
            reports = self._encode(0.3 - ordering, encoder, jobs, ends, invalid_rows)
        finally:
            self._should_stop.set()
            self._threads.shutdown(cancel_futures=True)
        shutil.rmtree(self._spill)
        return encoder, reports

    def _parse(
        self, segments: Mapping[str, Sequence[Segment]]
    ) -> tuple[list[Piece], dict[str, InvalidRowReport]]:
        jobs = [
            (split, segment, self._spill / f"{split}-{i}")
            for split, each in segments.items()
            for i, segment in enumerate(each)
        ]
        reports = dict.fromkeys(segments, NO_INVALID_ROWS)
        all_pieces: list[Piece] = []
        parsed = self._map("reading", 0.62, self.parse_segment, jobs)
        for split, of_split in segments.items():
            if not of_split:  # its rows are held out from the training files
                continue
            log, pieces = InvalidRowLog(self.config.data.max_invalid_fraction), list[Piece]()
            first_row = lines = 0
            for segment in of_split:
                blocks, of_segment = next(parsed)
                pieces += [each._replace(first_row=first_row + each.first_row) for each in of_segment]
                lines = lines if segment.start else 0
                for block in blocks:
                    log.add(segment.path, block.num_valid, [row.after(lines) for row in block.invalid])
                lines += sum(block.num_lines for block in blocks)
                first_row += sum(block.num_rows for block in blocks)
            reports[split] = log.finish()
            if split == TRAIN:
                pieces = hold_out(self.config, pieces)
            elif not pieces:
                names = ", ".join(dict.fromkeys(str(segment.path) for segment in of_split))
                raise DataError(f"{names}: no rows; check {PATH_KEYS[split]}")
            all_pieces += pieces
        return all_pieces, reports

    def _fit(
        self, pieces: Sequence[Piece]
    ) -> tuple[FittedStatistics, list[Mapping[str, Position]], Mapping[str, Position]]:
        """Return the training statistics, the start of each piece in each split, and the sizes of splits."""
        statistics = FittedStatistics.empty(self._layout)
        nothing = np.zeros(1 + len(self._layout.sparse), np.int64)
        starts, ends = list[Mapping[str, Position]](), dict.fromkeys(self.config.data.splits, nothing)
        for blocks in self._map("counting", 0.08, self.fit_piece, pieces):
            starts.append(ends.copy())
            for split, size, of_block in blocks:
                ends[split] = ends[split] + size
                statistics = statistics if of_block is None else statistics.plus(of_block)
        return statistics, starts, ends

    def _encode(
        self,
        weight: float,
        encoder: FeatureEncoder,
        jobs: Sequence[tuple[Piece, Mapping[str, Position]]],
        ends: Mapping[str, Position],
        invalid_rows: Mapping[str, InvalidRowReport],
    ) -> dict[str, DatasetReport]:
        for _ in self._map("writing", 0.0, self.index_values, encoder.sparse):
            pass
        targets = self._layout.targets
        # Threads do not open .npy files: in Python 3.11, two threads that parse their headers can fail.
        writers = {
            split: SplitWriter(self.folder / split, encoder.input_spec, targets, end)
            for split, end in ends.items()
        }
        sums: dict[str, list[LabelSums]] = {split: [] for split in ends}
        unknown = {split: np.zeros((3, len(encoder.sparse)), np.int64) for split in ends}
        encode = partial(self.encode_piece, encoder, writers)
        for split, of_block, counts in chain.from_iterable(self._map("writing", weight, encode, jobs)):
            sums[split].append(of_block)
            unknown[split] += counts
        by_time = [held.split for held in self.config.data.holdouts if held.by == "time"]
        return {
            split: DatasetReport(
                int(end[0]),
                label_reports(targets.tasks, sums[split]),
                invalid_rows[split],
                report_unknown(encoder, unknown[split], is_later=split in by_time),
            )
            for split, end in ends.items()
        }

    def parse_segment(self, job: tuple[str, Segment, Path]) -> tuple[list[BlockLog], list[Piece]]:
        """Parse the segment of a job (split, segment, new folder); return logs of blocks, and pieces."""
        split, segment, folder = job
        layout = self._layout if split == TRAIN else self._layout.without_holdouts
        folder.mkdir()
        blocks, pieces, held, row = list[BlockLog](), list[Piece](), list[RawBlock](), 0
        for table in sources.read_segment(segment, layout):
            block, invalid = sources.parse(segment.path, table, layout, row)
            blocks.append(BlockLog(table.num_rows, table.num_lines, len(block.source_rows_B), invalid))
            if len(block.source_rows_B):
                held.append(block)
            row += table.num_rows
            is_large = layout.data.format != "parquet" and len(held) >= sources.SEGMENT_BLOCKS
            if is_large or sum(len(each.source_rows_B) for each in held) >= sources.SEGMENT_ROWS:
                pieces.append(Piece.write(folder / f"piece-{len(pieces)}", held, split))
                held = []
            self._advance(table.num_rows)
        if held:
            pieces.append(Piece.write(folder / f"piece-{len(pieces)}", held, split))
        return blocks, pieces

    def fit_piece(self, piece: Piece) -> list[tuple[str, Position, FittedStatistics | None]]:
        """Count each value in the training rows of a piece, and write the counts into the piece's folder.

        Return for each split of each block: the name of the split, an array with the number of rows and
        the number of values in each column, and statistics of the rows (None except for "train").
        """
        layout = self._layout
        counts: list[npt.NDArray[np.int64]] = [
            np.zeros(len(values) * column.has_vocabulary, np.int64)
            for column, values in zip(layout.sparse, piece.dictionaries(), strict=True)
        ]
        blocks = list[tuple[str, Position, FittedStatistics | None]]()
        for split, rows in piece.blocks():
            values = [len(c.flatten()) if is_list(c) else len(c) - c.null_count for c in rows.sparse]
            statistics = FittedStatistics.of(rows, layout) if split == TRAIN else None
            blocks.append((split, np.array([len(rows.source_rows_B), *values]), statistics))
            for counts_D, column in zip(counts, rows.sparse, strict=True):
                if split == TRAIN and counts_D.size:
                    counts_D += ValueCounts.of(column).counts_D
        for k, counts_D in enumerate(counts):
            counts_D.tofile(piece.counts_path(k))
        return blocks

    def rank_values(self, pieces: Sequence[Piece], group: Sequence[int]) -> ValueCounts:
        """Rank by count the values of columns ``group`` as a vocabulary; DataError if memory may run out."""
        ranked = rank([])
        waiting, size = list[ValueCounts](), 0
        for i, piece in enumerate(pieces, 1):
            self._advance(0)
            values = piece.dictionaries()
            for k in group:
                waiting.append(ValueCounts(values[k], np.fromfile(piece.counts_path(k), np.int64)))
                size += len(values[k])
            # A sum costs as much as its values. So the values double, or sums would take most of the time.
            if i == len(pieces) or size > max(RANKED_AT_ONCE, len(ranked.values)):
                waiting.append(ranked)
                num_values = sum(len(each.values) for each in waiting)
                text_bytes = sum(pc.sum(pc.binary_length(each.values)).as_py() or 0 for each in waiting)
                num_bytes = _RANKED_VALUE * num_values + _RANKED_BYTE * text_bytes
                self._require_memory(num_bytes, [self._layout.sparse[k].name for k in group])
                ranked = rank(waiting)
                waiting, size = [], 0
        return ranked

    def index_values(self, encoding: SparseEncoding) -> None:
        """Build the index of a column that has a vocabulary; DataError if the free memory is too small."""
        if encoding.values is not None:
            texts = encoding.values.texts
            num_bytes = _HASHED_VALUE * len(texts)
            if len(texts):
                num_bytes += _HASHED_BYTE * texts.nbytes * min(HASHED_AT_ONCE, len(texts)) // len(texts)
            self._require_memory(num_bytes, [encoding.name])
            encoding.rows(pa.array([], pa.large_string()))

    def encode_piece(
        self,
        encoder: FeatureEncoder,
        writers: Mapping[str, SplitWriter],
        job: tuple[Piece, Mapping[str, Position]],
    ) -> list[tuple[str, LabelSums, npt.NDArray[np.int64]]]:
        """Encode and write the rows of a piece; ``job`` is the piece, and its start position in each split.

        Return for each split of each block: the split's name, label sums, and counts of unknown values.
        """
        piece, starts = job
        positions = dict(starts)
        # For each column, the table row of each distinct value.
        pairs = zip(encoder.sparse, piece.dictionaries(), strict=True)
        rows_of_values = [pa.array(each.rows(values)) for each, values in pairs]
        blocks = []
        for split, rows in piece.blocks(rows_of_values):
            assert rows.targets is not None
            encoded = encoder.encode(rows)
            positions[split] = writers[split].write(positions[split], encoded, rows.source_rows_B)
            blocks.append((split, LabelSums.of(rows.targets), count_unknown(encoder, rows, encoded)))
        return blocks

    def _require_memory(self, num_bytes: int, names: Sequence[str]) -> None:
        """Raise DataError for the columns ``names`` if the free memory is below ``num_bytes`` per thread."""
        num_bytes *= self._num_threads  # which share the free memory
        if num_bytes > available_memory_bytes():
            gib = num_bytes / 2**30
            rule = "set data.vocabulary = hash or grow, which keep no values, or add memory"
            raise DataError(f"{', '.join(names)}: a vocabulary of so many values needs {gib:.1f} GiB; {rule}")

    def _map(
        self, phase: str, weight: float, work: Callable[[Job], Result], jobs: Sequence[Job]
    ) -> Iterator[Result]:
        """Yield the result of ``work`` for each job, in the order of the jobs; raise the first exception.

        Progress reports show ``phase``, which takes about the fraction ``weight`` of the total time.
        """
        self._progress.start(phase)
        before = self._fraction
        for i, result in enumerate(self._threads.map(work, jobs), start=1):
            self._fraction = min(1.0, before + weight * i / len(jobs))
            self._advance(0)
            yield result

    def _advance(self, rows: int) -> None:
        """Report ``rows`` more rows as processed; raise _StoppedError if the preparation has failed."""
        if self._should_stop.is_set():
            raise _StoppedError
        self._progress.add(rows, self._fraction or None)


class _StoppedError(Exception):
    """Ends a job that still runs after the preparation has failed."""
