"""The session of a run that trains on a stream: unit after unit, until the stream ends."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from hybrid import transport
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.config.data_sections import TEST, TRAIN
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DatasetReport
from hybrid.data.encode.feature_encoder import FILE_NAME, FeatureEncoder
from hybrid.data.parse.input_files import check_unchanged
from hybrid.data.prepare.preparation import LOCAL_CACHE
from hybrid.data.stream.kafka_partitions import Topic, advance, read_sample
from hybrid.data.stream.units import StreamUnit, find_unit, first_unit, fit_on_blocks, fit_on_sample
from hybrid.data.values.invalid_rows import MAX_EXAMPLES, InvalidRowReport
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
_POLL_SECONDS = 2.0
_SLEEP_SECONDS = 0.1  # between two looks for a requested stop, or for rows of a topic
Found = TypeVar("Found")


class StreamSession(DatasetSession):
    """A session that trains on the units of a stream. ``total_steps`` is known once the stream ends.

    Args:
        stored: the checkpoint that will be loaded; None for a new run.
        should_stop: whether to stop waiting for a unit.

    Raises:
        ConfigError: there are more trainers than partitions of a topic.
        DataError: the first unit is missing, or cannot be read.

    Attributes:
        encoder: fitted on a sample of the first unit; with ``train.initial``, numbers are scaled as there.
        unit: the unit that is read; None between two units.
        last: the unit before it.
    """

    def __init__(
        self,
        topology: Topology,
        config: RunConfig,
        stored: Checkpoint | None,
        should_stop: Callable[[], bool],
        warn: Callable[[str], object],
        report: Callable[[str], None],
    ) -> None:
        check_custom_metrics(config.all_tasks)
        self._should_stop = should_stop
        self._report = report
        self._warn = warn
        self.unit: StreamUnit | None = None
        self.last: StreamUnit | None = None
        self._is_open = False  # whether the trainers read the unit
        self.meanwhile = lambda: None
        self.config = config
        self._invalid_before = NO_INVALID_ROWS  # of earlier units
        self._topic = Topic(config) if config.data.is_topic else None
        self._num_ready = 0  # further steps of a topic for which all rows are there
        if stored is None:
            unit = self._await_unit()
            if unit is None and self._topic is not None:
                raise DataError(f"{self._topic.name}: too few rows for the first step; check data.stream")
            self.unit = unit = unit or first_unit(config.data)
            encoder = self._fit(unit)
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

    def has_unit(self, step: int) -> bool:
        """Return whether there is a unit to read; wait for it if necessary.

        Args:
            step: steps taken; if there is no further unit, this is the end of the run.
        """
        if self.unit is None:
            self.unit = self._await_unit()
        if self.unit is None:
            if not self._should_stop():
                self.total_steps = step
                self.limit = "data.stream"
            return False
        if not self._is_open:
            self._is_open = True
            self._report(f"reading {self.unit.name}")
            calls = [
                t.call(Trainer.open_unit, self.unit, self.encoder, step, timeout_seconds=BULK_TIMEOUT_SECONDS)
                for t in self.trainers
            ]
            transport.gather(calls, self._meanwhile)
        return True

    def train(self, epoch: int, first_step: int, num_steps: int, steps_before: int) -> list[TrainerReport]:
        """Take some steps of the unit on all trainers; fewer, or none, if the unit ends.

        Of a topic, only steps are taken for which all rows are there. The call waits for one such step.
        """
        assert self.unit is not None
        has_ended = False
        if self._topic is not None:
            self._num_ready = self._num_ready or self._await_steps(self._topic, self.unit)
            num_steps = min(num_steps, self._num_ready)
            has_ended = not num_steps and not self._should_stop()
        timeout = self._timeout_seconds(num_steps)
        reports = self._on_trainers(timeout, Trainer.train_on_unit, num_steps, steps_before)
        count = len(reports[0].losses)
        self._num_ready = max(0, self._num_ready - count)
        self.unit = advance(self.config, self.unit, count)
        if count < num_steps or has_ended:
            self._end_unit(self.unit)
        return reports

    def _end_unit(self, unit: StreamUnit) -> None:
        check_unchanged(unit.files)
        self._add_invalid_rows(unit)
        self._invalid_before = self.reports[TRAIN].bad_rows
        self.last, self.unit, self._is_open = unit, None, False

    def _add_invalid_rows(self, unit: StreamUnit) -> None:
        """Add the invalid rows of the unit to the report; warn if there are further ones."""
        found = transport.gather([t.call(Trainer.invalid_rows) for t in self.trainers], self._meanwhile)
        before, reported = self._invalid_before, self.reports[TRAIN].bad_rows.total
        counts = sum((Counter(each.counts) for each in (before, *found)), Counter[str]())
        total = sum(each.total for each in found)
        if before.total + total > reported:
            example = next(example for each in found for example in each.examples)
            self._warn(f"{unit.name}: skipped {total:,} invalid row(s), such as {example}")
        examples = [*before.examples, *(e for each in found for e in each.examples)][:MAX_EXAMPLES]
        bad_rows = InvalidRowReport(dict(counts), tuple(examples))
        self.reports[TRAIN] = DatasetReport(0, (), bad_rows)

    def _own_progress(self) -> dict[str, Any]:
        unit = self.unit
        if unit is not None and self._is_open and self._topic is not None:
            self._add_invalid_rows(unit)
        elif unit is not None and self._is_open:
            calls = [trainer.call(Trainer.lane_positions, unit.step) for trainer in self.trainers]
            lanes = {
                lane: at for each in transport.gather(calls, self._meanwhile) for lane, at in each.items()
            }
            unit = replace(unit, lanes=tuple(lanes[lane] for lane in sorted(lanes)))
        position = {
            "unit": None if unit is None else asdict(unit),
            "last": None if self.last is None else asdict(replace(self.last, files=(), lanes=())),
        }
        return {STREAM: position}

    def load(self, stored: Checkpoint) -> None:
        """Load a checkpoint, and continue in the stream where it was taken.

        Raises:
            CheckpointError: the checkpoint is of another model, or has no position in a stream.
            DataError: a file has changed since.
        """
        try:
            position = stored.manifest.progress[STREAM]
            units = (position["unit"], position["last"])
            self.unit, self.last = (None if u is None else parse_fields(StreamUnit, dict(u)) for u in units)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            rule = "keep data.stream as it was, or start a new run with train.initial"
            raise CheckpointError(
                f"{stored.folder}: has no position in a stream ({error}); {rule}"
            ) from error
        if self._topic is not None and self.unit is None:  # the topic ended for lack of rows
            self.unit, self.last = self.last, None
        if self.unit is not None:
            check_unchanged(self.unit.files)
        Session.load(self, stored)

    def _await_unit(self) -> StreamUnit | None:
        """Return the next unit once it is complete; None if the stream ends, or a stop is requested.

        A topic is one unit, which is complete once it has the rows of a step.

        Raises:
            DataError: the unit ``until`` did not come in time.
        """
        data = self.config.data
        if self._topic is not None:
            topic = self._topic.first_unit()
            return topic if self.last is None and self._await_steps(self._topic, topic) else None
        until, hours = data.stream_call["until"], data.stream_call["wait_hours"]
        if self.last is not None and until and self.last.name == str(parse_path(until)):
            return None
        after = "the first unit" if self.last is None else f"the unit after {self.last.name}"
        unit = self._await(lambda: find_unit(data, self.last), after, _POLL_SECONDS)
        if unit is None and until and not self._should_stop():
            raise DataError(f"{until}: {after} was not complete within {hours:g} hours; check data.stream")
        return unit

    def _await_steps(self, topic: Topic, unit: StreamUnit) -> int:
        """Return the number of steps from ``unit`` on that the topic has; 0 if the stream ends, or a stop.

        The stream ends if a partition still lacks rows of the next step after ``wait_hours``.
        """
        found = self._await(lambda: topic.count_steps(unit) or None, f"rows of {unit.name}", _SLEEP_SECONDS)
        if found is None and any(rows := topic.count_rows(unit)) and not self._should_stop():
            behind = min(range(len(rows)), key=rows.__getitem__)
            left = f"{sum(rows):,} row(s) are left for a later run"
            self._warn(f"{unit.name}: partition {behind} has too few rows for a step; {left}")
        return found or 0

    def _await(self, find: Callable[[], Found | None], awaited: str, seconds: float) -> Found | None:
        """Return what ``find`` finds within ``wait_hours``; None if it finds nothing, or a stop is requested.

        Args:
            seconds: between two calls of ``find``.
        """
        start, is_reported = time.monotonic(), False
        deadline = start + 3600 * self.config.data.stream_call["wait_hours"]
        while (found := find()) is None and time.monotonic() < deadline:
            if not is_reported and time.monotonic() - start >= _POLL_SECONDS:
                is_reported = True
                self._report(f"waiting for {awaited}")
            end = min(deadline, time.monotonic() + seconds)
            while time.monotonic() < end and not self._should_stop():
                self.meanwhile()
                time.sleep(_SLEEP_SECONDS)
            if self._should_stop():
                return None
        return found

    def _fit(self, unit: StreamUnit) -> FeatureEncoder:
        if self._topic is None:
            return fit_on_sample(self.config, unit, self._report)
        self._report(f"reading a sample of {unit.name}")
        return fit_on_blocks(self.config, read_sample(self.config, unit, self._topic.count_steps(unit)))

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
