"""The position in a stream, and the wait for the next rows, in configured runs and custom loops.

The source of a stream is files and folders, or a Kafka topic. Each of the two has a reader class.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.config.data_sections import matches_path
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.fitting import FittedStatistics
from hybrid.data.parse.input_files import find_side_files
from hybrid.data.stream.kafka_partitions import PartitionReader, Topic, advance_unit
from hybrid.data.stream.units import (
    FileSource,
    LanePosition,
    LaneReader,
    StreamUnit,
    fit_on_blocks,
    stream_layout,
)
from hybrid.data.values.invalid_rows import InvalidRowReport
from hybrid.errors import CheckpointError, ConfigError
from hybrid.storage.file_formats import parse_fields

STREAM = "stream"  # the position in the stream, in the progress of a checkpoint
_UNREPORTED_SECONDS = 2.0  # of a wait
_SLEEP_SECONDS = 0.1
_NO_TIME = -sys.float_info.max  # lower than any event time, but finite, as JSON requires

Source: TypeAlias = FileSource | Topic
Reader: TypeAlias = LaneReader | PartitionReader


def open_source(config: RunConfig, warn: Callable[[str], object]) -> Source:
    """Return the source of units: files or a topic. For the errors of a topic, see :class:`Topic`."""
    return Topic(config) if config.data.is_topic else FileSource(config, warn)


def open_reader(
    config: RunConfig, encoder: FeatureEncoder, unit: StreamUnit, trainer: int, num_trainers: int
) -> Reader:
    """Return the reader of ``trainer`` from the position of ``unit`` on; for errors, see LaneReader."""
    kind = PartitionReader if config.data.is_topic else LaneReader
    return kind(config, encoder, unit, trainer, num_trainers)


class StreamCursor:
    """The current unit of a stream, the position in this unit, and the search for the next unit.

    Args:
        warn: receives each warning.
        report: receives a line when the run reads a sample, or has waited for rows for 2 seconds.

    Raises:
        ConfigError, DataError, OutageError: a topic cannot be read; see :class:`Topic`.

    Attributes:
        source: finds units.
        unit: the current unit; None before the first unit, between units, and if scale() could not read it.
        last: the unit before ``unit``, or None.
        num_ready: how many next steps have all their rows; for files, where this is unknown, a huge number.
        is_waiting: whether the run has waited so long for rows that the wait was reported.
        is_over: whether the stream has ended, because the time to wait for rows is over.
        invalid_rows: a report of the invalid rows since this object was created.
        delta_time: the event time of the next delta (checkpoint.deltas); infinite without ``event_seconds``.
    """

    def __init__(
        self, config: RunConfig, warn: Callable[[str], object], report: Callable[[str], object]
    ) -> None:
        self._config, self._warn, self._report = config, warn, report
        self.unit: StreamUnit | None = None
        self.last: StreamUnit | None = None
        self.num_ready = 0
        self.is_waiting = self.is_over = False
        self.invalid_rows = self._invalid_rows_before = NO_INVALID_ROWS  # before: of earlier units
        self._event_seconds: float = config.checkpoint.delta_call.arguments.get("event_seconds", 0.0)
        self.delta_time = _NO_TIME if self._event_seconds else math.inf
        self.source = open_source(config, warn)
        self._wait_start: float | None = None
        self._search_at = 0.0  # when the source is searched again

    def has_rows(self) -> bool:
        """Return whether there are rows for the next step. If not, sleep for 0.1 seconds, or set ``is_over``.

        Raise DataError if a unit or topic cannot be read, and StorageError if a store refuses the request.
        """
        if self.num_ready:
            return True
        now, source = time.monotonic(), self.source
        start = self._wait_start = now if self._wait_start is None else self._wait_start
        if now >= self._search_at:
            self.unit = self.unit or source.find(self.last)
            self.num_ready = source.count_steps(self.unit) if self.unit else 0
            if self.num_ready:
                self._wait_start, self.is_waiting = None, False
                return True
            end = start + 3600 * source.wait_hours(self.last)
            self.is_over = now >= end
            self._search_at = min(end, now + source.poll_seconds)
        if not self.is_over:
            if now - start >= _UNREPORTED_SECONDS and not self.is_waiting:
                self.is_waiting = True
                after = f" after {self.last.name}" if self.last else ""
                self._report(f"waiting for rows{f' of {self.unit.name}' if self.unit else after}")
            time.sleep(_SLEEP_SECONDS)
        return False

    def fit_encoder(self) -> FeatureEncoder:
        """Return the encoder of a new run, fitted on a sample of the first unit.

        Raise ConfigError if a file lacks a column; DataError or StorageError if the unit cannot be read.
        """
        self._report("reading a sample")
        return fit_on_blocks(self._config, self.source.sample(self.unit))

    def scale(self, encoder: FeatureEncoder) -> FeatureEncoder:
        """Return ``encoder``, with the scaling updated from a new unit if ``scaling_momentum`` is set.

        Raise ConfigError if a file lacks a column; DataError or StorageError if the unit cannot be read.
        """
        momentum = self._config.data.stream_call.arguments.get("scaling_momentum", 0.0)
        unit = self.unit
        if unit is None or unit.is_sampled or unit.step or not momentum:
            return encoder
        self.unit, self.num_ready = None, 0  # a unit that cannot be read has not begun, and may be repaired
        layout = stream_layout(self._config)
        moments = FittedStatistics.of_all(self.source.sample(unit), layout).moments
        moments = moments.average_with(encoder.dense, layout.dense, momentum)
        encoder = replace(encoder, dense=moments.encodings(layout.dense))
        self.unit, self.num_ready = replace(unit, is_sampled=True), self.source.count_steps(unit)
        return encoder

    def advance(self, num_steps: int) -> None:
        """Move the position past the next ``num_steps`` steps of the unit."""
        assert self.unit is not None
        self.num_ready -= num_steps
        self.unit = advance_unit(self._config, self.unit, num_steps)

    def is_delta_due(self, event_time: float) -> bool:
        """Return whether a step with latest event time ``event_time`` makes a delta (checkpoint.deltas) due.

        Once ``event_time`` reaches ``delta_time``, move ``delta_time`` to the next multiple of
        ``event_seconds``. The first event time of a stream only sets ``delta_time``.
        """
        reached = self.delta_time
        if event_time >= reached:
            self.delta_time = (event_time // self._event_seconds + 1) * self._event_seconds
        return event_time >= reached > _NO_TIME

    def set_lanes(self, positions: Mapping[int, LanePosition]) -> None:
        """Set the positions of the unit's lanes; do nothing if ``positions`` is empty, as for a topic."""
        if self.unit is not None and positions:
            self.unit = replace(self.unit, lanes=tuple(positions[lane] for lane in sorted(positions)))

    def add_invalid_rows(self, reports: Sequence[InvalidRowReport]) -> None:
        """Update ``invalid_rows`` by the trainers' ``reports`` on the unit; warn if the number has grown."""
        assert self.unit is not None
        of_unit = InvalidRowReport.merge(reports)
        invalid_rows = InvalidRowReport.merge([self._invalid_rows_before, of_unit])
        if invalid_rows.total > self.invalid_rows.total:
            skipped = f"skipped {of_unit.total:,} invalid row(s), such as {of_unit.examples[0]}"
            self._warn(f"{self.unit.name}: {skipped}")
        self.invalid_rows = invalid_rows

    def end_unit(self, reports: Sequence[InvalidRowReport]) -> None:
        """End the current unit; ``reports`` are the trainers' final reports of invalid rows in this unit."""
        self.add_invalid_rows(reports)
        self._invalid_rows_before = self.invalid_rows
        self.last, self.unit, self.num_ready = self.unit, None, 0

    def pack(self) -> dict[str, Any]:
        """Return ``{"stream": POSITION}``, an entry of the dictionary ``progress`` in a checkpoint."""
        last = None if self.last is None else asdict(replace(self.last, lanes=(), side_files=()))
        delta_time = {"delta_time": self.delta_time} if self._event_seconds else {}
        return {STREAM: {"unit": self.unit and asdict(self.unit), "last": last, **delta_time}}

    def restore(self, stored: Checkpoint) -> None:
        """Continue at the stream position that the checkpoint ``stored`` contains.

        Raise CheckpointError if there is no position, ConfigError if the unit does not match ``data.path``.
        Raise ConfigError, DataError or StorageError if the topic or a side table cannot be read.
        """
        try:
            position = stored.manifest.progress[STREAM]
            units = (position["unit"], position["last"])
            self.unit, self.last = (None if u is None else parse_fields(StreamUnit, dict(u)) for u in units)
            if self._event_seconds:
                self.delta_time = max(_NO_TIME, float(position.get("delta_time", _NO_TIME)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            lacks = f"{stored.folder}: has no position in a stream ({error})"
            rule = "keep data.stream as it was, or start a new run with train.initial"
            raise CheckpointError(f"{lacks}; {rule}") from error
        at, data = self.unit or self.last, self._config.data
        if at is not None and not data.is_topic:
            element = data.path[at.path_index : at.path_index + 1]  # empty if there are fewer elements now
            if not any(matches_path(pattern, at.name) for pattern in element):
                found = f"must match {at.name}, which the run has read, in element {at.path_index + 1}"
                rule = f"{found}; keep it, or start a new run with train.initial"
                raise ConfigError("data.path", rule, [*data.path])
        if self.unit is not None:
            self.unit = replace(self.unit, side_files=find_side_files(data))
        self.source, self.num_ready, self.is_over = open_source(self._config, self._warn), 0, False
