"""The session of a run that trains on a stream: unit after unit, until the stream ends."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.config.data_sections import TEST, TRAIN
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DatasetReport
from hybrid.data.encode.feature_encoder import FILE_NAME, FeatureEncoder
from hybrid.data.parse.input_files import check_unchanged
from hybrid.data.prepare.preparation import LOCAL_CACHE
from hybrid.data.stream.kafka_partitions import advance
from hybrid.data.stream.stream_source import open_source
from hybrid.data.stream.units import StreamUnit, fit_on_blocks
from hybrid.data.values.invalid_rows import InvalidRowReport
from hybrid.errors import CheckpointError, DataError
from hybrid.metrics import check_custom_metrics
from hybrid.storage import files as storage
from hybrid.storage.file_formats import parse_fields
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.topology import Topology
from workers.controller.deployment import BULK_TIMEOUT_SECONDS
from workers.controller.remote_trainer import Trainer, TrainerReport
from workers.controller.session import DatasetSession, Session

STREAM = "stream"  # the position in the stream, in the progress of a checkpoint
_UNREPORTED_SECONDS = 2.0  # of a wait
_SLEEP_SECONDS = 0.1


class StreamSession(DatasetSession):
    """A session that trains on the units of a stream. ``total_steps`` is known once the stream ends.

    Args:
        stored: the checkpoint that will be loaded; None for a new run, which waits for its first unit.

    Raises:
        ConfigError: there are more trainers than partitions of a topic.
        DataError: the first unit is missing, or cannot be read.

    Attributes:
        encoder: fitted on a sample of the first unit; with ``train.initial``, numbers are scaled as there.
        last: the unit before ``unit``.
    """

    def __init__(
        self,
        topology: Topology,
        config: RunConfig,
        stored: Checkpoint | None,
        warn: Callable[[str], object],
        report: Callable[[str], None],
    ) -> None:
        check_custom_metrics(config.all_tasks)
        self._report = report
        self._warn = warn
        self.last: StreamUnit | None = None
        self._is_open = False  # whether the trainers read the unit
        self._num_ready = 0  # further steps of the unit for which all rows are there
        self._wait_start: float | None = None
        self._search_at = 0.0  # when the source is searched again
        self._is_wait_reported = self._is_over = False
        self.meanwhile = lambda: None
        self.config = config
        self._invalid_before = NO_INVALID_ROWS  # of earlier units
        self._source = open_source(config, warn)
        if stored is None:
            while not self._has_rows() and not self._is_over:
                pass
            report("reading a sample")
            encoder = fit_on_blocks(config, self._source.sample(self.unit))
        else:
            encoder = FeatureEncoder.load(stored.files_folder)
        self.reports = dict.fromkeys((TRAIN, TEST), DatasetReport(0, (), NO_INVALID_ROWS))
        self.best_auc = None
        self.limit = "train.max_steps" if config.train.max_steps else "data.stream"
        self.total_steps = self.steps_per_epoch = config.train.max_steps or sys.maxsize
        Session.__init__(
            self,
            topology,
            config,
            encoder.input_spec,
            self.total_steps,
            encoder=encoder,
            encoder_folder=self._share(encoder) if stored is None else None,
            is_new=stored is None,
            warn=warn,
        )
        if self.initial is not None and self.initial.dense is not None:
            before = FeatureEncoder.load(self.initial.dense.files_folder, with_values=False)
            self.encoder = with_scaling_of(before, encoder)

    def is_ready(self, step: int) -> bool:
        """Return whether there are rows for the next step; else wait for a moment, or end the run."""
        has_rows = self._has_rows()
        if self.unit is not None and not self._is_open:
            self._is_open = True
            self._report(f"reading {self.unit.name}")
            # Trainers have other working directories.
            files = [replace(f, path=str(parse_path(f.path).absolute())) for f in self.unit.files]
            arguments = replace(self.unit, files=tuple(files)), self.encoder, step
            self._on_trainers(BULK_TIMEOUT_SECONDS, Trainer.open_unit, *arguments)
        if self._is_over:
            if left := self._source.end(self.unit, self.last):
                self._warn(left)
            if self.unit is not None:
                self._end_unit(self.unit)
            self.total_steps, self.limit = step, "data.stream"
        return has_rows

    def _has_rows(self) -> bool:
        """Return whether there are rows for the next step; else wait for a moment, or note the end."""
        if self._num_ready:
            return True
        now, source = time.monotonic(), self._source
        start = self._wait_start = now if self._wait_start is None else self._wait_start
        if now >= self._search_at:
            self.unit = self.unit or source.find(self.last)
            self._num_ready = source.count_steps(self.unit) if self.unit else 0
            if self._num_ready:
                self._wait_start, self._is_wait_reported = None, False
                return True
            end = start + 3600 * source.wait_hours(self.last)
            self._is_over = now >= end
            self._search_at = min(end, now + source.poll_seconds)
        if not self._is_over:
            if now - start >= _UNREPORTED_SECONDS and not self._is_wait_reported:
                self._is_wait_reported = True
                after = f" after {self.last.name}" if self.last else ""
                self._report(f"waiting for rows{f' of {self.unit.name}' if self.unit else after}")
            self.meanwhile()
            time.sleep(_SLEEP_SECONDS)
        return False

    def train(self, epoch: int, first_step: int, num_steps: int, steps_before: int) -> list[TrainerReport]:
        """Take some steps of the unit on all trainers, for which all rows are there; fewer if it ends."""
        assert self.unit is not None
        num_steps = min(num_steps, self._num_ready)
        timeout = self._timeout_seconds(num_steps)
        reports = self._on_trainers(timeout, Trainer.train_on_unit, num_steps, steps_before)
        count = len(reports[0].losses)
        self._num_ready -= count
        self.unit = advance(self.config, self.unit, count)
        if count < num_steps:
            self._end_unit(self.unit)
        return reports

    def _end_unit(self, unit: StreamUnit) -> None:
        check_unchanged(unit.files)
        self._add_invalid_rows(unit)
        self._invalid_before = self.reports[TRAIN].bad_rows
        self.last, self.unit, self.ended_unit = unit, None, unit.name
        self._is_open, self._num_ready = False, 0

    def _add_invalid_rows(self, unit: StreamUnit) -> None:
        """Add the invalid rows of the unit to the report; warn if there are further ones."""
        found = InvalidRowReport.merge(self._on_trainers(BULK_TIMEOUT_SECONDS, Trainer.invalid_rows))
        bad_rows = InvalidRowReport.merge([self._invalid_before, found])
        if bad_rows.total > self.reports[TRAIN].bad_rows.total:
            self._warn(f"{unit.name}: skipped {found.total:,} invalid row(s), such as {found.examples[0]}")
        self.reports[TRAIN] = DatasetReport(0, (), bad_rows)

    def _own_progress(self) -> dict[str, Any]:
        unit = self.unit
        if unit is not None and self._is_open:
            if unit.offsets:  # a topic has no end at which invalid rows are reported
                self._add_invalid_rows(unit)
            found = self._on_trainers(BULK_TIMEOUT_SECONDS, Trainer.lane_positions, unit.step)
            lanes = sorted((lane, at) for each in found for lane, at in each.items())
            unit = replace(unit, lanes=tuple(at for _, at in lanes))
        position = {
            "unit": None if unit is None else asdict(unit),
            "last": None if self.last is None else asdict(replace(self.last, files=(), lanes=())),
        }
        return {STREAM: position}

    def load(self, stored: Checkpoint) -> None:
        """Load a checkpoint, and continue in the stream where it was taken; see :meth:`Session.load`."""
        try:
            position = stored.manifest.progress[STREAM]
            units = (position["unit"], position["last"])
            self.unit, self.last = (None if u is None else parse_fields(StreamUnit, dict(u)) for u in units)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            lacks = f"{stored.folder}: has no position in a stream ({error})"
            rule = "keep data.stream as it was, or start a new run with train.initial"
            raise CheckpointError(f"{lacks}; {rule}") from error
        if self.unit is not None:
            check_unchanged(self.unit.files)
        Session.load(self, stored)

    def _share(self, encoder: FeatureEncoder) -> StoragePath | None:
        """Write the encoder where workers find it, if the run has an initial model; return the folder."""
        if not (self.config.train.initial or any(t.initial for t in self.config.tables.values())):
            return None
        text = encoder.to_json().encode()
        cache = parse_path(self.config.data.cache_folder or LOCAL_CACHE).absolute()
        folder = cache / f"stream-{hashlib.blake2b(text, digest_size=10).hexdigest()}"
        try:
            if isinstance(folder, Path):
                make_folder(folder)
            storage.write_bytes(folder / FILE_NAME, text)
        except OSError as error:
            raise DataError(f"{folder}: cannot be written ({error}); set data.cache_folder") from error
        return folder


def with_scaling_of(before: FeatureEncoder, encoder: FeatureEncoder) -> FeatureEncoder:
    """Return ``encoder`` with the scaling of the same columns of ``before``, so that a model can go on."""
    known = {(each.name, each.transform): each for each in before.dense}
    dense = tuple(
        known.get((each.name, each.transform), each) if (each.shift, each.scale) != (0, 1) else each
        for each in encoder.dense
    )
    return replace(encoder, dense=dense)
