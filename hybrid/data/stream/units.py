"""The units of a stream: the files and folders that ``data.path`` names, in order.

::

    data.path = ["log/day=*"]        log/day=01/_SUCCESS, part-0.parquet, part-1.parquet    unit 1
                                     log/day=02/_SUCCESS, part-0.parquet                    unit 2
                                     log/day=03/part-0.parquet                              not complete yet

A unit that sorts before the last one read is never read, because the position in a stream is the name of a
unit and a position in each of its lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from hybrid.config import RunConfig
from hybrid.config.data_sections import PATH_KEYS, TRAIN, DataSection
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.fitting import (
    FittedStatistics,
    Moments,
    bucketed_numbers,
    fit_encoder,
    has_several_values,
)
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.input_files import InputFile, expand, list_files, path_parts
from hybrid.data.parse.sources import RawBlock, Segment, parse, read_segment, split_files
from hybrid.errors import DataError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import parse_path

# Small segments, so that a unit of a few files has rows for all lanes.
SEGMENT_ROWS, SEGMENT_BYTES = 1 << 14, 4 << 20
# Rows of Parquet, and bytes of text, that a lane reads at once.
BLOCK_ROWS, BLOCK_BYTES = 1 << 13, 1 << 20
_SAMPLED_BLOCKS = 32

# The next row of a lane: its segment in the lane, its number among the valid rows of the segment, and the
# number of rows that the lane has given before it.
LanePosition: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class StreamUnit:
    """A unit, and the position in it."""

    order: int  # index of the path in data.path that names the unit
    name: str  # the path of the unit
    files: tuple[InputFile, ...]
    step: int = 0  # steps of the unit that have been taken
    lanes: tuple[LanePosition, ...] = ()  # the position of each lane after these steps; empty for the start
    offsets: tuple[int, ...] = ()  # of a Kafka topic: the next offset of each partition after these steps

    def segments(self, layout: Layout) -> list[Segment]:
        """Return the segments of all files, in order."""
        paths = [parse_path(file.path) for file in self.files]
        return split_files(paths, layout, SEGMENT_ROWS, SEGMENT_BYTES)


def stream_layout(config: RunConfig) -> Layout:
    return replace(Layout.of(config.data, config.columns, config.tasks), reads_keys=True)


def find_unit(data: DataSection, last: StreamUnit | None) -> StreamUnit | None:
    """Return the unit after ``last``, or the first one; None if it is missing or not complete.

    Raises:
        DataError: the unit has no files, or a folder without the form NAME=VALUE, or cannot be read.
        StorageError: a store refuses the request.
    """
    key, marker = PATH_KEYS[TRAIN], data.stream_call["marker"]
    for order, text in enumerate(data.path):
        for path in expand(text):
            if last is not None:
                before = path_parts(parse_path(last.name))
                if (order, path_parts(path)) <= (last.order, before):
                    continue
            found = storage.find_entry(path)
            if found is None:
                continue
            if found.is_folder and marker and not storage.exists(path / marker):
                return None
            files = storage.map_concurrently(InputFile.of, list_files([str(path)], key))
            return StreamUnit(order, str(path), tuple(files))
    return None


def first_unit(data: DataSection) -> StreamUnit:
    """Return the first unit; DataError if it is missing or not complete."""
    if (unit := find_unit(data, None)) is None:
        paths = ", ".join(data.path)
        raise DataError(f"{paths}: no complete file or folder; check {PATH_KEYS[TRAIN]} and data.stream")
    return unit


def fit_on_sample(config: RunConfig, unit: StreamUnit, report: Callable[[str], None]) -> FeatureEncoder:
    """Return the encoder of a stream: scaling and quantiles come from a sample of its first unit.

    The sample is the first block of up to 32 segments, evenly spread.

    Raises:
        ConfigError: a file lacks a column.
        DataError: a file cannot be read, or the sample has no valid row.
    """
    report(f"reading a sample of {unit.name}")
    return fit_on_blocks(config, _sampled_blocks(unit, stream_layout(config)))


def _sampled_blocks(unit: StreamUnit, layout: Layout) -> Iterator[RawBlock]:
    segments = unit.segments(layout)
    for index in np.unique(np.linspace(0, len(segments) - 1, _SAMPLED_BLOCKS).astype(int)).tolist():
        segment = segments[index]
        for table in read_segment(segment, layout, BLOCK_ROWS, BLOCK_BYTES):
            yield parse(segment.path, table, layout)[0]
            break


def fit_on_blocks(config: RunConfig, blocks: Iterable[RawBlock]) -> FeatureEncoder:
    """Return the encoder of a stream from a sample; DataError if it has no valid row."""
    layout = stream_layout(config)
    statistics = FittedStatistics(layout)
    for block in blocks:
        statistics.moments = statistics.moments.plus(Moments.of(block.dense_BF, layout.transforms))
        for k, (column, values) in enumerate(zip(layout.sparse, block.sparse, strict=True)):
            statistics.quantiles_K[k].add(bucketed_numbers(column, values))
            statistics.several_K[k] |= has_several_values(values)
    return fit_encoder(layout, config.tables, statistics, {})
