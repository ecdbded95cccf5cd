"""The samples of files, prepared: each part of a file is parsed once, by as many processes as cores."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.config.resolved_columns import Column
from hybrid.data.dataset.dataset_manifest import NO_BAD_ROWS, DatasetReport
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.fitting import Learnt, vocabularies
from hybrid.data.encode.unknown_values import UnknownCounter
from hybrid.data.encode.vocabulary import NO_VALUES
from hybrid.data.parse.segments import Part, parts_of
from hybrid.data.parse.sources import RawBlock
from hybrid.data.prepare import spill
from hybrid.data.prepare.holdout import Split
from hybrid.data.prepare.memory_limit import MemoryLimit
from hybrid.data.prepare.other_hosts import Helpers, OtherHosts, Stage
from hybrid.data.prepare.preparation_progress import Progress
from hybrid.data.prepare.process_pool import Job, Result, Told
from hybrid.data.prepare.processes import Processes
from hybrid.data.prepare.spill import PartLog
from hybrid.data.prepare.split_writer import LabelSums, SplitPlace, SplitWriter, label_reports
from hybrid.data.prepare.stages import (
    MAKING,
    TEST,
    TRAIN,
    EncodeJob,
    ParseJob,
    Piece,
    Reading,
    encode_piece,
    learn_piece,
    parse_part,
    send_part,
)
from hybrid.data.prepare.vocabulary_order import RankJob, rank_words
from hybrid.data.values.invalid_rows import BadRowLog, BadRowReport
from hybrid.errors import DataError
from hybrid.storage.remote_path import Place, RemotePath

_BYTES_A_PROCESS = 32 << 20  # to read less, none is started
# The stages, as somebody who waits is told of them.
_PHASES: Mapping[Stage, str] = MappingProxyType(
    {parse_part: "reading", learn_piece: "counting", rank_words: "ordering values", encode_piece: "writing"}
)
# What other hosts do where they see the folder of the parts, and where they do not. They write no arrays:
# network file systems lose what two hosts write to one page of a file.
_SHARED: Mapping[Stage, Stage] = MappingProxyType(
    {stage: stage for stage in (parse_part, learn_piece, rank_words)}
)
_SENT: Mapping[Stage, Stage] = MappingProxyType({parse_part: send_part})


class FilesPreparation:
    """Prepares the samples of files, and writes the arrays of both splits.

    Args:
        config: says how files are split.
        reading: says how they are read.
        folder: of the splits.
        spilt: of what is there meanwhile; parts that are in it are not parsed again.
        tell: told how far it is.
        check: called twice a second; what it raises ends the preparation.
        memory_bytes: that it takes at most, its processes together; see :meth:`MemoryLimit.of`.
        helpers: those of other hosts, if any may help.
    """

    def __init__(
        self,
        config: RunConfig,
        reading: Reading,
        folder: Path,
        spilt: Path,
        tell: Callable[[str], None],
        check: Callable[[], None],
        memory_bytes: int = 0,
        helpers: Helpers | None = None,
    ) -> None:
        self._config = config
        self._reading = reading
        self._layout = reading.layout
        self._folder = folder
        self._spill = spilt
        self._tell = tell
        self._progress = Progress(phases(self._layout.sparse), self._tell_progress, self._num_processes)
        self._count = 1  # of this host's
        self._check = check
        self._helpers = helpers
        self._helping: OtherHosts | None = None
        self._memory_bytes = memory_bytes

    def write(
        self, train: Sequence[Place], test: Sequence[Place]
    ) -> tuple[FeatureEncoder, dict[str, DatasetReport]]:
        """Write the arrays; what was learnt, and the reports of the splits.

        Args:
            train, test: the files; without test files, rows are held out.

        Raises:
            ConfigError: a key does not fit the files.
            DataError: a file cannot be used.
        """
        block_bytes = self._reading.block_bytes
        parts = {
            split: parts_of(files, self._layout, block_bytes)
            for split, files in ((TRAIN, train), (TEST, test))
        }
        size = sum(part.size for each in parts.values() for part in each)
        wanted = max(1, size // _BYTES_A_PROCESS)
        here = min(len(os.sched_getaffinity(0)), wanted)
        of_both = [*parts[TRAIN], *parts[TEST]]
        limit = MemoryLimit.of(self._memory_bytes, of_both, self._layout, block_bytes)
        count = self._count = limit.processes(here)
        if count < here:
            self._tell(limit.line(count, here))
        if self._helpers is not None and wanted > count:
            self._helping = self._other_hosts(self._helpers, limit)
        self._spill.mkdir(parents=True, exist_ok=True)
        for left in self._spill.glob(f"{MAKING}*"):
            shutil.rmtree(left)
        with Processes(count, self._check, self._helping) as processes:
            pieces, bad_rows = self._parse(processes, parts)
            learnt, starts = self._learn(processes, pieces)
            encoder = self._rank(processes, pieces, learnt, limit.job_bytes(count))
            reports = self._encode(processes, pieces, encoder, starts, bad_rows)
        return encoder, reports

    def _other_hosts(self, helpers: Helpers, limit: MemoryLimit) -> OtherHosts:
        """Those that see what they must."""
        if helpers.sent is not None:
            return OtherHosts(helpers, helpers.sent, self._tell, _SENT, limit.process_bytes)
        share = limit.share_bytes(self._count)  # to order values takes as much as there is
        return OtherHosts(helpers, self._spill, self._tell, _SHARED, share)

    def _parse(
        self, processes: Processes, parts: Mapping[str, Sequence[Part]]
    ) -> tuple[list[Piece], dict[str, BadRowReport]]:
        """The pieces of all parts, and the reports of bad rows."""
        jobs = [
            ParseJob(part, self._reading, *self._places(f"{split}-{i}"))
            for split, each in parts.items()
            for i, part in enumerate(each)
        ]
        logs = self._mapped(processes, parse_part, jobs, [max(1, job.part.size) for job in jobs])
        parsed = zip(jobs, logs, strict=True)
        train, bad_rows = self._logged(parsed, len(parts[TRAIN]))
        reports = {TRAIN: bad_rows, TEST: NO_BAD_ROWS}
        split = Split.of(self._config, _blocks(train))
        train = [piece._replace(split=split) for piece in train]
        if not parts[TEST]:
            return train, reports
        test, reports[TEST] = self._logged(parsed, len(parts[TEST]))
        if not test:
            names = ", ".join(dict.fromkeys(str(part.path) for part in parts[TEST]))
            raise DataError(f"{names}: no rows; check data.test_path")
        return [*train, *test], reports

    def _places(self, part: str) -> tuple[Path, RemotePath | None]:
        """Where a part is here, and where other hosts send it, if they do."""
        sent = self._helpers and self._helpers.sent
        return self._spill / part, sent and sent / part

    def _logged(
        self, parsed: Iterator[tuple[ParseJob, PartLog]], num_parts: int
    ) -> tuple[list[Piece], BadRowReport]:
        """The pieces of the next parts, and the report of their bad rows."""
        log = BadRowLog(self._config.data.bad_rows == "fail", self._config.data.max_bad_fraction)
        pieces = []
        first_row = lines = 0
        for job, found in islice(parsed, num_parts):
            if job.part.is_first:
                log.start_file()
                lines = 0
            for block in found.blocks:
                log.add(job.part.path, block.num_good, [row.after(lines) for row in block.bad])
            for i, piece in enumerate(found.pieces):
                pieces.append(Piece(spill.piece_folder(job.folder, i), first_row + piece.first_row, None))
            lines += found.num_lines
            first_row += found.num_rows
            if job.part.is_last:
                log.finish_file(job.part.path)
        return pieces, log.finish()

    def _learn(self, processes: Processes, pieces: Sequence[Piece]) -> tuple[Learnt, dict[str, list[_Start]]]:
        """What the training rows teach, and where the samples of each piece begin, and all end."""
        learnt = Learnt.of(self._layout)
        num_sparse = len(self._layout.sparse)
        starts = {split: [_Start(0, np.zeros(num_sparse, np.int64))] for split in (TRAIN, TEST)}
        jobs = [(piece, self._reading) for piece in pieces]
        for found in self._mapped(processes, learn_piece, jobs):
            for moments, numbers in zip(found.moments, found.numbers, strict=True):
                learnt.moments.add(moments)
                for quantiles, each in zip(learnt.quantiles_K, numbers, strict=True):
                    quantiles.add(each)
            learnt.several_K |= found.several_K
            for split, before in starts.items():
                num_rows, values_K = found.places.get(split, (0, 0))
                before.append(_Start(before[-1].row + num_rows, before[-1].values_K + values_K))
        return learnt, starts

    def _rank(
        self, processes: Processes, pieces: Sequence[Piece], learnt: Learnt, memory_bytes: int
    ) -> FeatureEncoder:
        """The encoder, once each piece knows the rows of its words; a job takes so much memory at most."""
        groups = vocabularies(self._layout.sparse, self._config.tables)
        folders = [piece.folder for piece in pieces]
        paths = {name: self._spill / f"vocabulary-{i}" for i, name in enumerate(groups)}
        jobs = [
            RankJob({k: self._layout.sparse[k] for k in group}, folders, paths[name], memory_bytes)
            for name, group in groups.items()
        ]
        for _ in self._mapped(processes, rank_words, jobs):
            pass
        words = {name: spill.read_ranked(path) for name, path in paths.items()}
        return FeatureEncoder.of_learnt(self._layout, self._config.tables, learnt, words)

    def _encode(
        self,
        processes: Processes,
        pieces: Sequence[Piece],
        encoder: FeatureEncoder,
        starts: Mapping[str, Sequence[_Start]],
        bad_rows: Mapping[str, BadRowReport],
    ) -> dict[str, DatasetReport]:
        """Write the samples of all pieces."""
        slim = dataclasses.replace(
            encoder, sparse=tuple(dataclasses.replace(each, values=NO_VALUES) for each in encoder.sparse)
        )
        multi_hot = [k for k, each in enumerate(encoder.sparse) if each.multi_hot]
        places = {split: [start.place(multi_hot) for start in each] for split, each in starts.items()}
        targets = self._layout.targets
        jobs = [
            EncodeJob(piece, slim, targets, {split: each[i] for split, each in places.items()}, self._folder)
            for i, piece in enumerate(pieces)
        ]
        sums: dict[str, list[LabelSums]] = {split: [] for split in places}
        unknown = {split: UnknownCounter(encoder) for split in places}
        for written in self._mapped(processes, encode_piece, jobs):
            for split, found in written.items():
                sums[split] += found.label_sums
                unknown[split].add_counted(found.unknown_K, found.values_K)
        reports = {}
        for split, each in places.items():
            SplitWriter(self._folder / split, encoder.input_spec, targets, each[-1]).close()
            labels = label_reports(targets.tasks, sums[split])
            reports[split] = DatasetReport(each[-1].row, labels, bad_rows[split], unknown[split].report())
        return reports

    def _mapped(
        self,
        processes: Processes,
        work: Callable[[Job, Told], Result],
        jobs: Sequence[Job],
        sizes: Sequence[int] = (),
    ) -> Iterator[Result]:
        """What ``work``, a stage, makes of each job, in their order."""
        if self._helping is not None and not self._helping.does(work):
            self._helping.close()  # nor do they do anything later
        self._progress.start(_PHASES[work], sizes or [1] * len(jobs))
        yield from processes.map(work, jobs, self._progress.told)

    def _num_processes(self, phase: str) -> int:
        """How many a phase has."""
        others = self._helping
        if others is None or not any(others.does(each) for each, name in _PHASES.items() if name == phase):
            return self._count
        return self._count + others.num_processes

    def _tell_progress(self, line: str) -> None:
        helping = self._helping.text if self._helping is not None else ""
        self._tell(f"{line}, with {helping}" if helping else line)


def phases(columns: Sequence[Column]) -> dict[str, float]:
    """The share of the time that each phase takes of rows like Criteo's, with these columns of data.sparse.

    Values without a vocabulary are not ordered, and hashed as they are written, which takes as long.
    """
    known = sum(map(len, vocabularies(columns, {}).values())) / max(1, len(columns))
    return {"reading": 0.62, "counting": 0.08, "ordering values": 0.15 * known, "writing": 0.3 - 0.15 * known}


class _Start(NamedTuple):
    """Rows of a split, and values of each column of data.sparse, before a piece."""

    row: int
    values_K: npt.NDArray[np.int64]

    def place(self, multi_hot: Sequence[int]) -> SplitPlace:
        return SplitPlace(self.row, tuple(self.values_K[[*multi_hot]].tolist()))


def _blocks(pieces: Sequence[Piece]) -> Iterator[RawBlock]:
    """The rows of pieces, without their categorical columns."""
    for piece in pieces:
        yield from spill.read_piece(piece.folder, piece.first_row, ())
