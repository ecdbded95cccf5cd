"""Preparation of files: each segment of a file is parsed once, by as many threads as there are cores."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.config.data_sections import PATH_KEYS, TRAIN
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DatasetReport
from hybrid.data.dataset.prepared_dataset import LabelSums, SplitPosition, create_arrays, label_reports
from hybrid.data.encode.feature_encoder import FeatureEncoder, report_unknown
from hybrid.data.encode.fitting import FittedStatistics, ValueCounts, fit_encoder, group_by_vocabulary
from hybrid.data.parse import delimited_text
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import SEGMENT_BLOCKS, Segment, split_files
from hybrid.data.prepare import spill
from hybrid.data.prepare.spill import SegmentLog
from hybrid.data.prepare.stages import UNFINISHED, Piece, encode_piece, fit_piece, hold_out, parse_segment
from hybrid.data.prepare.vocabulary_order import rank_values
from hybrid.data.values.invalid_rows import InvalidRowLog, InvalidRowReport
from hybrid.errors import ConfigError, DataError
from hybrid.primitives.available_memory import available_memory_bytes
from hybrid.primitives.progress import Progress
from hybrid.storage.remote_path import StoragePath

Job = TypeVar("Job")
Result = TypeVar("Result")

_BYTES_PER_THREAD = 32 << 20  # a smaller input gets fewer threads
_CHECK_SECONDS = 0.5
_SHARED_BYTES = 64 << 20  # logs and statistics of all segments
_THREAD_BYTES = 128 << 20  # memory of a thread, besides the rows in it
# Measured upper limits of the memory for parsing: per byte of text with single values and with several values
# in a field; per value of Parquet, and per byte of a Parquet file.
_PER_BYTE, _PER_BYTE_OF_BAGS = 8, 20
_PER_VALUE, _PER_PACKED_BYTE = 48, 20


def limit_memory(
    limit_bytes: int, segments: Sequence[Segment], layout: Layout, max_threads: int
) -> tuple[int, int]:
    """Return the number of threads that fit into a memory limit, and the bytes for a job of a thread.

    Args:
        limit_bytes: the limit, in addition to the current memory of the process. 0 means half of the free
            memory, but at least the memory of one thread.

    Raises:
        ConfigError: the largest segment does not fit.
    """
    has_bags = any(column.separator or column.kind == "weighted" for column in layout.sparse)
    per_byte = _PER_BYTE_OF_BAGS if has_bags else _PER_BYTE
    at_once = SEGMENT_BLOCKS * delimited_text.BLOCK_BYTES
    parse_bytes = 0
    for segment in segments:
        if layout.data.format == "parquet":
            values = segment.rows * len(layout.required)
            needed = _PER_VALUE * values + _PER_PACKED_BYTE * segment.size
        else:
            needed = per_byte * (at_once if segment.stop is None else min(segment.size, at_once))
        parse_bytes = max(parse_bytes, needed)
    enough = _SHARED_BYTES + _THREAD_BYTES + parse_bytes
    limit_bytes = limit_bytes or max(available_memory_bytes() // 2, enough)
    if limit_bytes < enough:
        gib = math.ceil(enough / 2**30 * 100) / 100
        rule = f"is too little to parse a segment of the files; {gib:g} are enough"
        raise ConfigError("data.prepare_memory_gb", rule, round(limit_bytes / 2**30, 3))
    count = min(max_threads, (limit_bytes - _SHARED_BYTES) // (_THREAD_BYTES + parse_bytes))
    return count, (limit_bytes - _SHARED_BYTES) // count - _THREAD_BYTES


@dataclass(eq=False)
class FilesPreparation:
    """Prepares the samples of files, and writes the arrays of all splits."""

    config: RunConfig  # the file format, the rules for splits, and the memory limit
    folder: Path  # folder of the splits; reuses segments that an earlier preparation has parsed into it
    report: Callable[[str], None]  # see hybrid.data.prepare.preparation.prepare
    check: Callable[[], None]  # see hybrid.data.prepare.preparation.prepare

    def __post_init__(self) -> None:
        self._layout = Layout.of(self.config.data, self.config.columns, self.config.tasks)
        self._spill = self.folder / "segments"
        self._progress = Progress(self.report)
        self._fraction = 0.0  # completed fraction of the work
        self._should_stop = threading.Event()

    def write(
        self, files: Mapping[str, Sequence[StoragePath]]
    ) -> tuple[FeatureEncoder, dict[str, DatasetReport]]:
        """Write the arrays; return the encoder and the reports of the splits.

        Args:
            files: the files of each split; the rows of a split without files are held out from training.

        Raises:
            ConfigError: a key does not fit the files.
            DataError: a file cannot be used.
        """
        segments = {split: split_files(each, self._layout) for split, each in files.items()}
        all_segments = [*chain(*segments.values())]
        size = sum(segment.size for segment in all_segments)
        most = min(len(os.sched_getaffinity(0)), max(1, size // _BYTES_PER_THREAD))
        limit_bytes = int(self.config.data.prepare_memory_gb * 2**30)
        count, job_bytes = limit_memory(limit_bytes, all_segments, self._layout, most)
        if count < most:
            rule = "data.prepare_memory_gb has no room for more"
            self.report(f"preparing with {count} thread{'s' * (count != 1)}, not {most}: {rule}")
        self._spill.mkdir(parents=True, exist_ok=True)
        for unfinished in self._spill.glob(f"{UNFINISHED}*"):
            shutil.rmtree(unfinished)
        groups = group_by_vocabulary(self._layout.sparse, self.config.tables)
        # Ordering values takes about as long as hashing other columns does in the last phase.
        ordering = 0.15 * sum(map(len, groups.values())) / max(1, len(self._layout.sparse))
        # Arrow and numpy release the interpreter's lock while they work, so threads use all cores.
        self._threads = ThreadPoolExecutor(count, "prepare")
        try:
            pieces, invalid_rows = self._parse(segments)
            statistics, starts = self._fit(pieces)
            ranked = self._rank(ordering, pieces, groups, job_bytes)
            encoder = fit_encoder(self._layout, self.config.tables, statistics, ranked)
            reports = self._encode(0.3 - ordering, pieces, encoder, starts, invalid_rows)
        finally:
            self._should_stop.set()
            self._threads.shutdown(cancel_futures=True)
        shutil.rmtree(self._spill)
        return encoder, reports

    def _parse(
        self, segments: Mapping[str, Sequence[Segment]]
    ) -> tuple[list[Piece], dict[str, InvalidRowReport]]:
        """Return the pieces of all segments, and the reports of invalid rows."""
        layouts = dict.fromkeys(segments, self._layout.without_holdouts) | {TRAIN: self._layout}
        jobs = [
            (split, segment, self._spill / f"{split}-{i}")
            for split, each in segments.items()
            for i, segment in enumerate(each)
        ]

        def parse(job: tuple[str, Segment, Path]) -> SegmentLog:
            split, segment, folder = job
            return parse_segment(segment, folder, layouts[split], self._advance)

        reports = dict.fromkeys(self.config.data.splits, NO_INVALID_ROWS)
        all_pieces: list[Piece] = []
        parsed = zip(jobs, self._map("reading", 0.62, parse, jobs), strict=True)
        for split, of_split in groupby(parsed, lambda each: each[0][0]):
            pieces, reports[split] = self._collect(of_split)
            if split == TRAIN:
                pieces = hold_out(self.config, pieces)
            elif not pieces:
                names = ", ".join(dict.fromkeys(str(segment.path) for segment in segments[split]))
                raise DataError(f"{names}: no rows; check {PATH_KEYS[split]}")
            all_pieces += pieces
        return all_pieces, reports

    def _collect(
        self, parsed: Iterator[tuple[tuple[str, Segment, Path], SegmentLog]]
    ) -> tuple[list[Piece], InvalidRowReport]:
        """Return the pieces of the segments of a split, and their invalid rows."""
        log = InvalidRowLog(self.config.data.max_invalid_fraction)
        pieces = []
        first_row = lines = 0
        for (split, segment, folder), segment_log in parsed:
            if not segment.start:
                lines = 0
            for block in segment_log.blocks:
                log.add(segment.path, block.num_valid, [row.after(lines) for row in block.invalid])
            for i, piece in enumerate(segment_log.pieces):
                pieces.append(Piece(spill.piece_folder(folder, i), first_row + piece, split))
            lines += sum(block.num_lines for block in segment_log.blocks)
            first_row += sum(block.num_rows for block in segment_log.blocks)
        return pieces, log.finish()

    def _fit(self, pieces: Sequence[Piece]) -> tuple[FittedStatistics, dict[str, list[SplitPosition]]]:
        """Return statistics of the training rows; and for each split, the starts of pieces, and the end."""
        statistics = FittedStatistics(self._layout)
        nothing = SplitPosition(0, np.zeros(len(self._layout.sparse), np.int64))
        layout = self._layout
        starts = {split: [nothing] for split in layout.data.splits}
        for of_piece in self._map("counting", 0.08, lambda piece: fit_piece(piece, layout), pieces):
            for moments, numbers in zip(of_piece.moments, of_piece.numbers, strict=True):
                statistics.moments = statistics.moments.plus(moments)
                for quantiles, each in zip(statistics.quantiles_K, numbers, strict=True):
                    quantiles.add(each)
            statistics.several_K |= of_piece.several_K
            for split, (num_rows, values_K) in of_piece.sizes.items():
                last = starts[split][-1]
                starts[split].append(SplitPosition(last.row + num_rows, last.values_K + values_K))
        return statistics, starts

    def _rank(
        self, weight: float, pieces: Sequence[Piece], groups: Mapping[str, Sequence[int]], job_bytes: int
    ) -> dict[str, ValueCounts]:
        """Order the values of each vocabulary."""
        folders = [piece.folder for piece in pieces]

        def rank(job: tuple[int, Sequence[int]]) -> ValueCounts:
            columns = {k: self._layout.sparse[k] for k in job[1]}
            folder = self._spill / f"vocabulary-{job[0]}"
            return rank_values(columns, folders, folder, job_bytes, lambda: self._advance(0))

        ranked = self._map("ordering values", weight, rank, [*enumerate(groups.values())])
        return dict(zip(groups, ranked, strict=True))

    def _encode(
        self,
        weight: float,
        pieces: Sequence[Piece],
        encoder: FeatureEncoder,
        starts: Mapping[str, Sequence[SplitPosition]],
        invalid_rows: Mapping[str, InvalidRowReport],
    ) -> dict[str, DatasetReport]:
        targets = self._layout.targets
        for split, (*_, end) in starts.items():
            create_arrays(self.folder / split, encoder.input_spec, targets, end)

        def encode(job: int) -> dict[str, tuple[list[LabelSums], npt.NDArray[np.int64]]]:
            positions = {split: each[job] for split, each in starts.items()}
            return encode_piece(pieces[job], encoder, positions, self.folder)

        sums: dict[str, list[LabelSums]] = {split: [] for split in starts}
        unknown = {split: np.zeros((3, len(encoder.sparse)), np.int64) for split in starts}
        for of_splits in self._map("writing", weight, encode, range(len(pieces))):
            for split, (label_sums, counts) in of_splits.items():
                sums[split] += label_sums
                unknown[split] += counts
        by_time = [held.split for held in self.config.data.holdouts if held.by == "time"]
        return {
            split: DatasetReport(
                end.row,
                label_reports(targets.tasks, sums[split]),
                invalid_rows[split],
                report_unknown(encoder, unknown[split], is_later=split in by_time),
            )
            for split, (*_, end) in starts.items()
        }

    def _map(
        self, phase: str, weight: float, work: Callable[[Job], Result], jobs: Sequence[Job]
    ) -> Iterator[Result]:
        """Yield the result of ``work`` for each job, in the order of the jobs.

        If a job fails, its exception is raised in place of its result.

        Args:
            weight: the phase's fraction of the total time, measured for rows like Criteo's.
        """
        self._progress.start(phase)
        before = self._fraction
        futures = [self._threads.submit(work, job) for job in jobs]
        for i, future in enumerate(futures):
            self.check()
            while wait([future], _CHECK_SECONDS).not_done:
                self.check()
            result = future.result()
            self._fraction = min(1.0, before + weight * (i + 1) / len(jobs))
            self._advance(0)
            yield result

    def _advance(self, rows: int) -> None:
        """Count processed rows; end the job of this thread if the preparation has ended."""
        if self._should_stop.is_set():
            raise _StoppedError
        self._progress.add(rows, self._fraction or None)


class _StoppedError(Exception):
    """The preparation has ended, and the result of a job is not used."""
