"""What a stream needs from its source: files and folders, or the partitions of a Kafka topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from hybrid.config import RunConfig
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.parse.sources import RawBlock
from hybrid.data.stream.kafka_partitions import PartitionReader, Topic
from hybrid.data.stream.lanes import LaneReader
from hybrid.data.stream.units import Files, StreamUnit

Reader: TypeAlias = LaneReader | PartitionReader


class Source(Protocol):
    """A source, as the master sees it. ``last`` is the last unit that has ended; None for the first unit."""

    poll_seconds: float  # time between two searches

    def find(self, last: StreamUnit | None) -> StreamUnit | None:
        """Return the unit after ``last``; None if it is missing or not complete."""

    def count_steps(self, unit: StreamUnit) -> int:
        """Return the number of steps, from the position on, for which all rows are there."""

    def sample(self, unit: StreamUnit | None) -> Iterator[RawBlock]:
        """Yield some rows of a unit, from its start; DataError if it is missing, or has no step."""

    def wait_hours(self, last: StreamUnit | None) -> float:
        """Return the hours that the stream waits for its next rows before it ends or fails."""

    def end(self, unit: StreamUnit | None, last: StreamUnit | None) -> str:
        """Return a warning about unread rows of ``unit``; DataError if the stream must not end there."""


def open_source(config: RunConfig, warn: Callable[[str], object]) -> Source:
    """Return the source of a stream; see :class:`Files` and :class:`Topic`."""
    return Topic(config) if config.data.is_topic else Files(config, warn)


def open_reader(
    config: RunConfig, encoder: FeatureEncoder, unit: StreamUnit, trainer: int, num_trainers: int
) -> Reader:
    """Return the reader of one trainer for a unit, from the position on."""
    kind = PartitionReader if config.data.is_topic else LaneReader
    return kind(config, encoder, unit, trainer, num_trainers)
