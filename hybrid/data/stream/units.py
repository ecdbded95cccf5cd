"""The units of a stream: the files and folders that ``data.path`` names, in order.

::

    data.path = ["log/day=*"]        log/day=01/_SUCCESS, part-0.parquet, part-1.parquet    unit 1
                                     log/day=02/_SUCCESS, part-0.parquet                    unit 2
                                     log/day=03/part-0.parquet                              not complete yet

A unit that sorts before the unit in progress is never read, because the position in a stream is the name of a
unit and a position in each of its lanes. If such a unit appears while the run trains, a warning names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from hybrid.config import RunConfig
from hybrid.config.data_sections import FITTED_SCALINGS, PATH_KEYS, TRAIN
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.fitting import FittedStatistics, fit_encoder
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.input_files import InputFile, expand_pattern, find_side_files, list_files, path_parts
from hybrid.data.parse.side_tables import read_side_tables
from hybrid.data.parse.sources import RawBlock, Segment, parse, read_segment, split_files
from hybrid.data.values.invalid_rows import InvalidRowLog
from hybrid.errors import DataError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import parse_path

# Small segments, so that a unit of a few files has rows for all lanes.
SEGMENT_ROWS, SEGMENT_BYTES = 1 << 14, 4 << 20
# Rows of Parquet, and bytes of text, that a lane reads at once.
BLOCK_ROWS, BLOCK_BYTES = 1 << 13, 1 << 20
_SAMPLED_BLOCKS = 32
SINCE_CHECKPOINT = "has changed since the checkpoint; restore it, or start a new run with train.initial"

_side_tables = lru_cache(maxsize=1)(read_side_tables)  # until a file changes


class LanePosition(NamedTuple):
    """The next row of a lane."""

    segment: int = 0  # index of the segment in the lane
    row: int = 0  # index among the valid rows of the segment
    num_returned: int = 0  # rows that the lane has returned before


@dataclass(frozen=True, slots=True)
class StreamUnit:
    """A unit of a stream (a file, a folder, or a Kafka topic), and the position in it."""

    path_index: int  # of the element of data.path that names the unit
    name: str  # the path of the unit
    files: tuple[InputFile, ...]
    number: int = 0  # units of the stream before this one
    step: int = 0  # steps of the unit that have been taken
    lanes: tuple[LanePosition, ...] = ()  # the position of each lane after these steps; empty for the start
    offsets: tuple[int, ...] = ()  # of a Kafka topic: the next offset of each partition after these steps
    is_sampled: bool = False  # whether the scaling of numbers has followed a sample of the unit
    # The files of each side table, as they were when the unit was found, or when the run resumed.
    side_files: tuple[tuple[InputFile, ...], ...] = ()

    def layout(self, config: RunConfig) -> Layout:
        """Return the columns of the unit and its side tables; raise errors of :func:`read_side_tables`."""
        layout = stream_layout(config)
        return replace(layout, side_tables=_side_tables(config.data, layout.required, self.side_files))

    def added_files(self) -> list[str]:
        """Return the files that the unit has got since it was found; none if its files are not known."""
        with suppress(DataError):  # the unit may be removed after it was read
            now = {str(path) for path in list_files([self.name], PATH_KEYS[TRAIN])} if self.files else set()
            return sorted(now - {file.path for file in self.files})
        return []

    def segments(self, layout: Layout) -> list[Segment]:
        """Return the segments (byte ranges, or row groups of Parquet) of all files, in order."""
        paths = [parse_path(file.path) for file in self.files]
        return split_files(paths, layout, SEGMENT_ROWS, SEGMENT_BYTES)


def stream_layout(config: RunConfig) -> Layout:
    """Return the columns of a stream, without side tables; :meth:`StreamUnit.layout` adds them."""
    return replace(Layout.of(config.data, config.columns, config.tasks), reads_keys=True)


class FileSource:
    """Files and folders as the source of a stream.

    In its methods, ``last`` is the last unit that has ended, or None.

    Args:
        warn: receives a line for each unit that appears too late to be read, or gets a file too late.
    """

    poll_seconds = 2.0  # time between two searches

    def __init__(self, config: RunConfig, warn: Callable[[str], object]) -> None:
        self._config, self._warn = config, warn
        until = config.data.stream_call["until"]
        self._until = str(parse_path(until)) if until else ""
        self._known: set[str] | None = None  # paths up to the last unit; None before the first search

    def find(self, last: StreamUnit | None) -> StreamUnit | None:
        """Return the unit after ``last``, or the first; None if it is missing, incomplete or after ``until``.

        Raises:
            DataError: the unit or a side table has no files (see :func:`list_files`), or cannot be read.
            StorageError: a store or the file system refuses the request.
        """
        if last is not None and last.name == self._until:
            return None
        data, is_first_search = self._config.data, self._known is None
        known = self._known = self._known or set()
        end = None if last is None else (last.path_index, path_parts(parse_path(last.name)))
        for index, path in ((i, path) for i, text in enumerate(data.path) for path in expand_pattern(text)):
            name = str(path)
            if last is not None and end is not None and (index, path_parts(path)) <= end:
                if name not in known and storage.exists(path):
                    known.add(name)
                    if not is_first_search and name != last.name:
                        self._warn(
                            f"{name}: is not read, since {last.name}, which sorts after it, came first"
                        )
            elif (found := storage.find_entry(path)) is not None:
                marker = data.stream_call["marker"]
                if found.is_folder and marker and not storage.exists(path / marker):
                    return None
                if last is not None and (added := last.added_files()):
                    which = f"{len(added)} file(s), such as {added[0]}, are not read"
                    self._warn(f"{last.name}: {which}, since they were added after the unit had begun")
                files = storage.map_concurrently(InputFile.of, list_files([name], PATH_KEYS[TRAIN]))
                number = 0 if last is None else last.number + 1
                return StreamUnit(index, name, tuple(files), number, side_files=find_side_files(data))
        return None

    def count_steps(self, unit: StreamUnit) -> int:
        """Return ``sys.maxsize``: the number of steps in a unit of files is not known in advance."""
        return sys.maxsize  # trainers find the end of the unit

    def sample(self, unit: StreamUnit | None) -> Iterator[RawBlock]:
        """Yield the first block of up to 32 evenly spread segments of the unit.

        Raise ConfigError if a file lacks a column, StorageError if a file is refused, and DataError if there
        is no unit, it cannot be read, or the first 10,000 rows of the sample (or all) are invalid.
        """
        if unit is None:
            paths = ", ".join(self._config.data.path)
            raise DataError(f"{paths}: no complete file or folder; check {PATH_KEYS[TRAIN]} and data.stream")
        layout = unit.layout(self._config)
        segments, log = unit.segments(layout), InvalidRowLog(1.0)
        for index in np.unique(np.linspace(0, len(segments) - 1, _SAMPLED_BLOCKS).astype(int)).tolist():
            for table in islice(read_segment(segments[index], layout, BLOCK_ROWS, BLOCK_BYTES), 1):
                block, invalid = parse(segments[index].path, table, layout)
                # With one path for all, only a sample without any valid row is an error.
                log.add(segments[0].path, len(block.source_rows_B), invalid)
                yield block
        log.check_file()

    def wait_hours(self, last: StreamUnit | None) -> float:
        """Return the hours to wait for the next unit before the stream ends or fails; 0 after ``until``."""
        is_last = last is not None and last.name == self._until
        return 0.0 if is_last else float(self._config.data.stream_call["wait_hours"])

    def end(self, at: StreamUnit | None) -> str:
        """Raise DataError if the last unit, ``at``, is not the ``until`` of data.stream; else return ""."""
        if self._until and at is not None and at.name != self._until:
            late = f"the unit after {at.name} was not complete within {self.wait_hours(at):g} hours"
            raise DataError(f"{self._until}: {late}; check data.stream")
        return ""


def fit_on_blocks(config: RunConfig, blocks: Iterable[RawBlock]) -> FeatureEncoder:
    """Return the encoder of a stream; ``blocks`` are a sample of its first unit, for scaling and quantiles.

    Raise DataError if the blocks have no row; an error of the iterator ``blocks`` is raised, too.
    """
    layout = stream_layout(config)
    return fit_encoder(layout, config.tables, FittedStatistics.of_all(blocks, layout), {})


def with_scaling_of(config: RunConfig, before: FeatureEncoder, encoder: FeatureEncoder) -> FeatureEncoder:
    """Return ``encoder`` with the fitted scalings of ``before``, except where the transform differs."""
    known = {(each.name, each.transform): each for each in before.dense}
    dense = tuple(
        known.get((each.name, each.transform), each) if column.scaling.name in FITTED_SCALINGS else each
        for column, each in zip(stream_layout(config).dense, encoder.dense, strict=True)
    )
    return replace(encoder, dense=dense)
