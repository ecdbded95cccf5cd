"""The sources of a stream and their readers: files and folders, or the partitions of a Kafka topic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hybrid.config import RunConfig
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.stream.kafka_partitions import PartitionReader, Topic
from hybrid.data.stream.lanes import LaneReader
from hybrid.data.stream.units import Files, StreamUnit

Source: TypeAlias = Files | Topic
Reader: TypeAlias = LaneReader | PartitionReader


def open_source(config: RunConfig, warn: Callable[[str], object]) -> Source:
    """Return the source of a stream, as the master sees it."""
    return Topic(config) if config.data.is_topic else Files(config, warn)


def open_reader(
    config: RunConfig, encoder: FeatureEncoder, unit: StreamUnit, trainer: int, num_trainers: int
) -> Reader:
    """Return the reader of one trainer for a unit, from the position on."""
    kind = PartitionReader if config.data.is_topic else LaneReader
    return kind(config, encoder, unit, trainer, num_trainers)
