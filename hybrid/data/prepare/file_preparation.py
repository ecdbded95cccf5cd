"""Preparation of files: each segment of a file is parsed once, by as many threads as there are cores."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.config.data_sections import PATH_KEYS, TRAIN
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DatasetReport
from hybrid.data.dataset.prepared_dataset import LabelSums, SplitPosition, create_arrays, label_reports
from hybrid.data.encode.feature_encoder import FeatureEncoder, SparseEncoding, report_unknown
from hybrid.data.encode.fitting import FittedStatistics, ValueCounts, fit_encoder, group_by_vocabulary
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.input_files import find_side_files
from hybrid.data.parse.side_tables import read_side_tables
from hybrid.data.parse.sources import Segment, split_files
from hybrid.data.prepare import spill
from hybrid.data.prepare.spill import SegmentLog
from hybrid.data.prepare.stages import (
    Piece,
    encode_piece,
    fit_piece,
    hold_out,
    index_values,
    parse_segment,
    rank_values,
)
from hybrid.data.values.invalid_rows import InvalidRowLog, InvalidRowReport
from hybrid.errors import DataError
from hybrid.primitives.available_memory import available_memory_bytes
from hybrid.primitives.progress import Progress
from hybrid.storage.remote_path import StoragePath

Job = TypeVar("Job")
Result = TypeVar("Result")

_BYTES_PER_THREAD = 32 << 20  # a smaller input gets fewer threads
# Estimate of a thread's memory: 64 MiB of text, with up to 16 bytes for each byte of it.
_MEMORY_PER_THREAD = 1 << 30


@dataclass(eq=False)
class FilesPreparation:
    """Prepares the samples of files, and writes the arrays of all splits."""

    config: RunConfig  # the file format, and the rules for splits
    folder: Path  # folder of the splits
    report: Callable[[str], None]  # see hybrid.data.prepare.preparation.prepare

    def __post_init__(self) -> None:
        layout = Layout.of(self.config.data, self.config.columns, self.config.tasks)
        tables = read_side_tables(self.config.data, layout.required, find_side_files(self.config.data))
        self._layout = replace(layout, side_tables=tables)
        self._spill = self.folder / "segments"
        self._progress = Progress(self.report)
        self._fraction = 0.0  # completed fraction of the work
        self._should_stop = threading.Event()

    def write(
        self, files: Mapping[str, Sequence[StoragePath]]
    ) -> tuple[FeatureEncoder, dict[str, DatasetReport]]:
        """Write the arrays of the splits of ``files``; return the encoder, and the report of each split."""
        segments = {split: split_files(each, self._layout) for split, each in files.items()}
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
            statistics, starts = self._fit(pieces)

            def rank(group: Sequence[int]) -> ValueCounts:
                columns = {k: self._layout.sparse[k].name for k in group}
                return rank_values(columns, pieces, self._num_threads, lambda: self._advance(0))

            ranked = self._map("ordering values", ordering, rank, [*groups.values()])
            vocabularies = dict(zip(groups, ranked, strict=True))
            encoder = fit_encoder(self._layout, self.config.tables, statistics, vocabularies)
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

    def _encode(
        self,
        weight: float,
        pieces: Sequence[Piece],
        encoder: FeatureEncoder,
        starts: Mapping[str, Sequence[SplitPosition]],
        invalid_rows: Mapping[str, InvalidRowReport],
    ) -> dict[str, DatasetReport]:
        def index(encoding: SparseEncoding) -> None:
            index_values(encoding, self._num_threads)

        for _ in self._map("writing", 0.0, index, encoder.sparse):
            pass
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
