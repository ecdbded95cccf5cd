"""Preparation of files: each segment of a file is parsed once, by as many threads as there are cores."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DatasetReport
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.fitting import FittedStatistics, vocabularies
from hybrid.data.encode.unknown_values import report_unknown
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.segments import Segment, split_files
from hybrid.data.parse.text_lines import BLOCK_BYTES
from hybrid.data.prepare import spill
from hybrid.data.prepare.holdout import Split
from hybrid.data.prepare.memory_limit import MemoryLimit
from hybrid.data.prepare.spill import SegmentLog
from hybrid.data.prepare.split_writer import LabelSums, SplitPosition, SplitWriter, label_reports
from hybrid.data.prepare.stages import (
    TEST,
    TRAIN,
    UNFINISHED,
    Piece,
    ReportRows,
    encode_piece,
    fit_piece,
    parse_segment,
)
from hybrid.data.prepare.vocabulary_order import RankJob, rank_values
from hybrid.data.values.invalid_rows import InvalidRowLog, InvalidRowReport
from hybrid.errors import DataError
from hybrid.primitives.progress import Progress
from hybrid.storage.remote_path import StoragePath

Job = TypeVar("Job")
Result = TypeVar("Result")

_BYTES_PER_THREAD = 32 << 20  # a smaller input gets fewer threads
_CHECK_SECONDS = 0.5


class FilesPreparation:
    """Prepares the samples of files, and writes the arrays of both splits.

    Args:
        config: defines how files are read, and how rows are split.
        folder: of the splits.
        spill_folder: of intermediate files; segments that it holds are not parsed again.
        report: receives progress, one line at a time.
        check: called twice a second; what it raises ends the preparation.
        memory_bytes: the most that it takes; see :meth:`MemoryLimit.of`.
        block_bytes: text that is parsed at a time.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        spill_folder: Path,
        report: Callable[[str], None],
        check: Callable[[], None],
        memory_bytes: int = 0,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._config = config
        self._layout = Layout.of(config.data, config.columns, config.tasks)
        self._folder = folder
        self._spill = spill_folder
        self._report = report
        self._progress = Progress(report)
        self._done = 0.0  # fraction of the time that the phases so far take
        self._check = check
        self._should_stop = threading.Event()
        self._memory_bytes = memory_bytes
        self._block_bytes = block_bytes

    def write(
        self, train: Sequence[StoragePath], test: Sequence[StoragePath]
    ) -> tuple[FeatureEncoder, dict[str, DatasetReport]]:
        """Write the arrays; return the encoder and the reports of the splits.

        Args:
            train, test: the files; without test files, some training rows are held out.

        Raises:
            ConfigError: a key does not fit the files.
            DataError: a file cannot be used.
        """
        segments = {
            split: split_files(files, self._layout, self._block_bytes)
            for split, files in ((TRAIN, train), (TEST, test))
        }
        of_both = [*segments[TRAIN], *segments[TEST]]
        size = sum(segment.size for segment in of_both)
        wanted = min(len(os.sched_getaffinity(0)), max(1, size // _BYTES_PER_THREAD))
        limit = MemoryLimit.of(self._memory_bytes, of_both, self._layout, self._block_bytes)
        count = limit.count_threads(wanted)
        if count < wanted:
            self._report(limit.line(count, wanted))
        self._spill.mkdir(parents=True, exist_ok=True)
        for unfinished in self._spill.glob(f"{UNFINISHED}*"):
            shutil.rmtree(unfinished)
        # Ordering of values takes about as long as hashing them later would.
        ordered = sum(map(len, vocabularies(self._layout.sparse, {}).values()))
        ordering = 0.15 * ordered / max(1, len(self._layout.sparse))
        # Arrow and numpy release the interpreter's lock while they work, so threads use all cores.
        self._threads = ThreadPoolExecutor(count, "prepare")
        try:
            pieces, invalid_rows = self._parse(segments)
            statistics, starts = self._fit(pieces)
            groups = vocabularies(self._layout.sparse, self._config.tables)
            paths = {name: self._spill / f"vocabulary-{i}" for i, name in enumerate(groups)}
            folders = [piece.folder for piece in pieces]
            jobs = []
            for name, group in groups.items():
                columns = {k: self._layout.sparse[k] for k in group}
                jobs.append(RankJob(columns, folders, paths[name], limit.job_bytes(count)))
            for _ in self._map("ordering values", ordering, rank_values, jobs):
                pass
            ranked = {name: spill.read_ranked(path) for name, path in paths.items()}
            encoder = FeatureEncoder.of_statistics(self._layout, self._config.tables, statistics, ranked)
            reports = self._encode(0.3 - ordering, pieces, encoder, starts, invalid_rows)
        finally:
            self._should_stop.set()
            self._threads.shutdown(cancel_futures=True)
        return encoder, reports

    def _parse(
        self, segments: Mapping[str, Sequence[Segment]]
    ) -> tuple[list[Piece], dict[str, InvalidRowReport]]:
        """Return the pieces of all segments, and the reports of invalid rows."""
        jobs = [
            (segment, self._spill / f"{split}-{i}")
            for split, each in segments.items()
            for i, segment in enumerate(each)
        ]

        def parse(job: tuple[Segment, Path], report: ReportRows) -> SegmentLog:
            return parse_segment(*job, self._layout, self._block_bytes, report)

        sizes = [max(1, segment.size) for segment, _ in jobs]
        parsed = zip(jobs, self._map("reading", 0.62, parse, jobs, sizes), strict=True)
        train, invalid_rows = self._collect(parsed, len(segments[TRAIN]))
        reports = {TRAIN: invalid_rows, TEST: NO_INVALID_ROWS}
        values = (each for piece in train for each in spill.read_split_values(piece.folder, piece.first_row))
        split = Split.of(self._config, values)
        train = [piece._replace(split=split) for piece in train]
        if not segments[TEST]:
            return train, reports
        test, reports[TEST] = self._collect(parsed, len(segments[TEST]))
        if not test:
            names = ", ".join(dict.fromkeys(str(segment.path) for segment in segments[TEST]))
            raise DataError(f"{names}: no rows; check data.test_path")
        return [*train, *test], reports

    def _collect(
        self, parsed: Iterator[tuple[tuple[Segment, Path], SegmentLog]], num_segments: int
    ) -> tuple[list[Piece], InvalidRowReport]:
        """Return the pieces of the next segments, and the report of their invalid rows."""
        log = InvalidRowLog(self._config.data.max_invalid_fraction)
        pieces = []
        first_row = lines = 0
        for (segment, folder), segment_log in islice(parsed, num_segments):
            if segment.is_first:
                log.start_file()
                lines = 0
            for block in segment_log.blocks:
                log.add(segment.path, block.num_valid, [row.after(lines) for row in block.invalid])
            for i, piece in enumerate(segment_log.pieces):
                pieces.append(Piece(spill.piece_folder(folder, i), first_row + piece, None))
            lines += sum(block.num_lines for block in segment_log.blocks)
            first_row += sum(block.num_rows for block in segment_log.blocks)
            if segment.is_last:
                log.finish_file(segment.path)
        return pieces, log.finish()

    def _fit(self, pieces: Sequence[Piece]) -> tuple[FittedStatistics, dict[str, list[SplitPosition]]]:
        """Return statistics of the training rows; for each split, the start of each piece, and the end."""
        statistics = FittedStatistics.of(self._layout)
        nothing = SplitPosition(0, np.zeros(len(self._layout.sparse), np.int64))
        starts = {split: [nothing] for split in (TRAIN, TEST)}
        layout = self._layout
        for of_piece in self._map("counting", 0.08, lambda piece, _: fit_piece(piece, layout), pieces):
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
        """Write the samples of all pieces; return the reports of the splits."""
        targets = self._layout.targets

        def encode(job: int, _: ReportRows) -> dict[str, tuple[list[LabelSums], npt.NDArray[np.int64]]]:
            starts_of = {split: each[job] for split, each in starts.items()}
            return encode_piece(pieces[job], encoder, targets, starts_of, self._folder)

        sums: dict[str, list[LabelSums]] = {split: [] for split in starts}
        unknown = {split: np.zeros((2, len(encoder.sparse)), np.int64) for split in starts}
        for of_splits in self._map("writing", weight, encode, range(len(pieces))):
            for split, (label_sums, counts) in of_splits.items():
                sums[split] += label_sums
                unknown[split] += counts
        is_by_time = self._config.data.split_call.name == "time"
        reports = {}
        for split, (*_, end) in starts.items():
            SplitWriter(self._folder / split, encoder.input_spec, targets, end).close()
            reports[split] = DatasetReport(
                end.row,
                label_reports(targets.tasks, sums[split]),
                invalid_rows[split],
                report_unknown(encoder, unknown[split], is_later=is_by_time and split == TEST),
            )
        return reports

    def _map(
        self,
        phase: str,
        weight: float,
        work: Callable[[Job, ReportRows], Result],
        jobs: Sequence[Job],
        sizes: Sequence[int] = (),
    ) -> Iterator[Result]:
        """Yield the result of ``work`` for each job, in the order of the jobs.

        An exception of a job is raised in its turn, as if the jobs ran one after the other.

        Args:
            weight: the usual fraction of the time that the phase takes, of rows like Criteo's.
            sizes: of the jobs; by default all are alike.
        """
        sizes = sizes or [1] * len(jobs)
        total = max(1, sum(sizes))
        done = [0.0] * len(jobs)
        before = self._done
        self._done += weight
        self._progress.start(phase)

        def run(number: int) -> Result:
            def report(rows: int, fraction: float) -> None:
                done[number] = sizes[number] * fraction / total
                self._progress.add(rows, min(1.0, before + weight * sum(done)))
                if self._should_stop.is_set():
                    raise _StoppedError

            if self._should_stop.is_set():
                raise _StoppedError
            result = work(jobs[number], report)
            report(0, 1.0)
            return result

        futures = [self._threads.submit(run, number) for number in range(len(jobs))]
        for future in futures:
            self._check()
            while wait([future], _CHECK_SECONDS).not_done:
                self._check()
            yield future.result()


class _StoppedError(Exception):
    """Ends a job whose result is not used."""
