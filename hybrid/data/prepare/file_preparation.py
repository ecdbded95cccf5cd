"""Preparation of files: each segment of a file is parsed once, by as many threads as there are cores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DatasetReport
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.fitting import FittedStatistics, vocabularies
from hybrid.data.encode.unknown_values import UnknownCounter
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.segments import Segment, split_files
from hybrid.data.parse.text_lines import BLOCK_BYTES
from hybrid.data.prepare import spill
from hybrid.data.prepare.holdout import Split
from hybrid.data.prepare.job_threads import Job, JobThreads, ReportRows, Result
from hybrid.data.prepare.memory_limit import MemoryLimit
from hybrid.data.prepare.spill import SegmentLog
from hybrid.data.prepare.split_writer import LabelSums, SplitPosition, SplitWriter, label_reports
from hybrid.data.prepare.stages import (
    TEST,
    TRAIN,
    UNFINISHED,
    Piece,
    PieceStatistics,
    PieceSums,
    encode_piece,
    fit_piece,
    parse_segment,
)
from hybrid.data.prepare.vocabulary_order import RankJob, rank_values
from hybrid.data.values.invalid_rows import InvalidRowLog, InvalidRowReport
from hybrid.errors import DataError
from hybrid.primitives.progress import Progress
from hybrid.storage.remote_path import StoragePath

_BYTES_PER_THREAD = 32 << 20  # a smaller input gets fewer threads


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
        with JobThreads(count, self._check) as threads:
            pieces, invalid_rows = self._parse(threads, segments)
            statistics, starts = self._fit(threads, pieces)
            encoder = self._rank(threads, ordering, pieces, statistics, limit.job_bytes(count))
            reports = self._encode(threads, 0.3 - ordering, pieces, encoder, starts, invalid_rows)
        return encoder, reports

    def _parse(
        self, threads: JobThreads, segments: Mapping[str, Sequence[Segment]]
    ) -> tuple[list[Piece], dict[str, InvalidRowReport]]:
        """Return the pieces of all segments, and the reports of invalid rows."""
        jobs = [
            (segment, self._spill / f"{split}-{i}")
            for split, each in segments.items()
            for i, segment in enumerate(each)
        ]

        def parse(job: tuple[Segment, Path], report: ReportRows) -> SegmentLog:
            return parse_segment(job[0], self._layout, self._block_bytes, job[1], report)

        sizes = [max(1, segment.size) for segment, _ in jobs]
        logs = self._map(threads, "reading", 0.62, parse, jobs, sizes)
        parsed = zip(jobs, logs, strict=True)
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
            lines += segment_log.num_lines
            first_row += segment_log.num_rows
            if segment.is_last:
                log.finish_file(segment.path)
        return pieces, log.finish()

    def _fit(
        self, threads: JobThreads, pieces: Sequence[Piece]
    ) -> tuple[FittedStatistics, dict[str, list[_Start]]]:
        """Return statistics of the training rows; for each split, the start of each piece, and the end."""
        statistics = FittedStatistics.of(self._layout)
        starts = {split: [_Start(0, np.zeros(len(self._layout.sparse), np.int64))] for split in (TRAIN, TEST)}

        def fit(piece: Piece, report: ReportRows) -> PieceStatistics:
            return fit_piece(piece, self._layout, report)

        for of_piece in self._map(threads, "counting", 0.08, fit, pieces):
            for moments, numbers in zip(of_piece.moments, of_piece.numbers, strict=True):
                statistics.moments.add(moments)
                for quantiles, each in zip(statistics.quantiles_K, numbers, strict=True):
                    quantiles.add(each)
            statistics.several_K |= of_piece.several_K
            for split, before in starts.items():
                num_rows, values_K = of_piece.sizes.get(split, (0, 0))
                before.append(_Start(before[-1].row + num_rows, before[-1].values_K + values_K))
        return statistics, starts

    def _rank(
        self,
        threads: JobThreads,
        weight: float,
        pieces: Sequence[Piece],
        statistics: FittedStatistics,
        memory_bytes: int,
    ) -> FeatureEncoder:
        """Return the encoder; write the table rows of the values of each piece."""
        groups = vocabularies(self._layout.sparse, self._config.tables)
        folders = [piece.folder for piece in pieces]
        paths = {name: self._spill / f"vocabulary-{i}" for i, name in enumerate(groups)}
        jobs = [
            RankJob({k: self._layout.sparse[k] for k in group}, folders, paths[name], memory_bytes)
            for name, group in groups.items()
        ]
        for _ in self._map(threads, "ordering values", weight, rank_values, jobs):
            pass
        ranked = {name: spill.read_ranked(path) for name, path in paths.items()}
        return FeatureEncoder.of_statistics(self._layout, self._config.tables, statistics, ranked)

    def _encode(
        self,
        threads: JobThreads,
        weight: float,
        pieces: Sequence[Piece],
        encoder: FeatureEncoder,
        starts: Mapping[str, Sequence[_Start]],
        invalid_rows: Mapping[str, InvalidRowReport],
    ) -> dict[str, DatasetReport]:
        """Write the samples of all pieces; return the reports of the splits."""
        multi_hot = [k for k, each in enumerate(encoder.sparse) if each.multi_hot]
        positions = {
            split: [SplitPosition(start.row, tuple(start.values_K[multi_hot].tolist())) for start in each]
            for split, each in starts.items()
        }
        targets = self._layout.targets

        def encode(job: int, report: ReportRows) -> dict[str, PieceSums]:
            starts_of = {split: each[job] for split, each in positions.items()}
            return encode_piece(pieces[job], encoder, targets, starts_of, self._folder, report)

        sums: dict[str, list[LabelSums]] = {split: [] for split in positions}
        is_later = self._config.data.split_call.name == "time"
        unknown = {split: UnknownCounter(encoder, is_later=is_later and split == TEST) for split in positions}
        for of_splits in self._map(threads, "writing", weight, encode, range(len(pieces))):
            for split, of_piece in of_splits.items():
                sums[split] += of_piece.label_sums
                unknown[split].add_counts(of_piece.unknown_K, of_piece.values_K)
        reports = {}
        for split, each in positions.items():
            SplitWriter(self._folder / split, encoder.input_spec, targets, each[-1]).close()
            labels = label_reports(targets.tasks, sums[split])
            reports[split] = DatasetReport(each[-1].row, labels, invalid_rows[split], unknown[split].report())
        return reports

    def _map(
        self,
        threads: JobThreads,
        phase: str,
        weight: float,
        work: Callable[[Job, ReportRows], Result],
        jobs: Sequence[Job],
        sizes: Sequence[int] = (),
    ) -> Iterator[Result]:
        """Yield the result of a stage for each job, in their order.

        Args:
            weight: the usual fraction of the time that the phase takes, of rows like Criteo's.
            sizes: of the jobs; by default all are alike.
        """
        sizes = sizes or [1] * len(jobs)
        total = max(1, sum(sizes))
        done = [0.0] * len(jobs)

        def report(job: int, rows: int, fraction: float) -> None:
            done[job] = sizes[job] * fraction / total
            self._progress.add(rows, min(1.0, before + weight * sum(done)))

        before = self._done
        self._done += weight
        self._progress.start(phase)
        yield from threads.map(work, jobs, report)


class _Start(NamedTuple):
    """Rows of a split, and values of each column of data.sparse, before a piece."""

    row: int
    values_K: npt.NDArray[np.int64]
