"""The units of a stream: the files and folders that ``data.path`` names, in order, and the lanes of a unit.

::

    data.path = ["log/day=*"]        log/day=01/_SUCCESS, part-0.parquet, part-1.parquet    unit 1
                                     log/day=02/_SUCCESS, part-0.parquet                    unit 2
                                     log/day=03/part-0.parquet                              not complete yet

    segments of a unit               s0  s1  s2  s3  s4  s5  s6        in the order of files
    lanes (here three)               lane 0: s0 s3 s6 | lane 1: s1 s4 | lane 2: s2 s5
    trainers (here two)              trainer 0: lanes 0, 2            | trainer 1: lane 1

A unit that sorts before the unit in progress is never read, because the position in a stream is the name of a
unit and a position in each of its lanes. If such a unit appears while the run trains, a warning names it.

A step takes rows from every lane that has not ended, in proportion to the size of the lane in the unit. So
all lanes end at about the same step. The lanes do not depend on the number of trainers, so the rows of a step
do not, either. A trainer parses only its lanes.
"""

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from hybrid.batch import Batch
from hybrid.config import RunConfig
from hybrid.config.data_sections import FITTED_SCALINGS, PATH_KEYS, TRAIN
from hybrid.data.batches import BatchStream
from hybrid.data.dataset.prepared_dataset import block_batch
from hybrid.data.encode.feature_encoder import EncodedBags, EncodedBlock, FeatureEncoder
from hybrid.data.encode.fitting import FittedStatistics, fit_encoder
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.input_files import InputFile, expand_pattern, find_side_files, list_files, path_parts
from hybrid.data.parse.side_tables import read_side_tables
from hybrid.data.parse.sources import RawBlock, Segment, parse, read_segment, split_files
from hybrid.data.values.invalid_rows import InvalidRowLog, InvalidRowReport
from hybrid.data.values.model_columns import Targets
from hybrid.errors import DataError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import parse_path

# Small segments, so that a unit of a few files has rows for all lanes.
SEGMENT_ROWS, SEGMENT_BYTES = 1 << 14, 4 << 20
# Rows of Parquet, and bytes of text, that a lane reads at once.
BLOCK_ROWS, BLOCK_BYTES = 1 << 13, 1 << 20
_SAMPLED_BLOCKS = 32
# A trainer reads at most 2 batches ahead (BatchStream), and prefetches the lookups of at most 2 more.
_KEPT_POSITIONS = 16
SINCE_CHECKPOINT = "has changed since the checkpoint; restore it, or start a new run with train.initial"

_side_tables = lru_cache(maxsize=1)(read_side_tables)  # until a file changes


class LanePosition(NamedTuple):
    """The position of the next row in a lane."""

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
    is_sampled: bool = False  # whether a sample of the unit has updated the scaling of numbers
    # The files of each side table, as they were when the unit was found, or when the run resumed.
    side_files: tuple[tuple[InputFile, ...], ...] = ()

    def layout(self, config: RunConfig) -> Layout:
        """Return the columns to parse, with side tables; for errors, see :func:`read_side_tables`."""
        layout = stream_layout(config)
        return replace(layout, side_tables=_side_tables(config.data, layout.required, self.side_files))

    def describe_added_files(self) -> str:
        """Return a warning if files were added to the unit after it was found, else an empty text."""
        with suppress(DataError):  # the unit may be removed after it was read
            # Earlier versions stored no files of a unit that has ended.
            now = {str(path) for path in list_files([self.name], PATH_KEYS[TRAIN])} if self.files else set()
            if added := sorted(now - {file.path for file in self.files}):
                which = f"{len(added)} file(s), such as {added[0]}, are not read"
                return f"{self.name}: {which}, since they were added after the unit had begun"
        return ""

    def segments(self, layout: Layout) -> list[Segment]:
        """Return the segments (byte ranges, or row groups of Parquet) of all files, in order."""
        paths = [parse_path(file.path) for file in self.files]
        return split_files(paths, layout, SEGMENT_ROWS, SEGMENT_BYTES)


def stream_layout(config: RunConfig) -> Layout:
    """Return the columns to parse, without side tables; :meth:`StreamUnit.layout` adds side tables."""
    return replace(Layout.of(config.data, config.columns, config.tasks), reads_keys=True)


class FileSource:
    """Files and folders as the source of a stream.

    In methods, ``last`` is the last unit that has ended, or None; ``until`` is an argument of data.stream.

    Args:
        warn: receives a line about each unit, or files of a unit, that appeared too late to be read.
    """

    poll_seconds = 2.0  # time between two searches

    def __init__(self, config: RunConfig, warn: Callable[[str], object]) -> None:
        self._config, self._warn = config, warn
        until = config.data.stream_call["until"]
        self._until = str(parse_path(until)) if until else ""
        self._known: set[str] | None = None  # paths up to the last unit; None before the first search

    def find(self, last: StreamUnit | None) -> StreamUnit | None:
        """Return the next unit; None if it is missing or incomplete, or if ``last`` is the unit ``until``.

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
                        self._warn(f"{name}: is not read, since {last.name} sorts after it and came first")
            elif (found := storage.find_entry(path)) is not None:
                marker = data.stream_call["marker"]
                if found.is_folder and marker and not storage.exists(path / marker):
                    return None
                if last is not None and (added := last.describe_added_files()):
                    self._warn(added)
                files = storage.map_concurrently(InputFile.of, list_files([name], PATH_KEYS[TRAIN]))
                number = 0 if last is None else last.number + 1
                return StreamUnit(index, name, tuple(files), number, side_files=find_side_files(data))
        return None

    def count_steps(self, unit: StreamUnit) -> int:
        """Return ``sys.maxsize``: the number of steps in a unit of files is not known in advance."""
        return sys.maxsize  # trainers find the end of the unit

    def sample(self, unit: StreamUnit | None) -> Iterator[RawBlock]:
        """Yield a sample of the unit: the first blocks of up to 32 evenly spread segments.

        Raise ConfigError if a file lacks a column, and StorageError if a store or the system refuses a file.
        Raise DataError if ``unit`` is None or cannot be read, or if no row among the first 10,000 is valid.
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
        """Return how many hours to wait for the next unit; 0 if ``last`` is the unit ``until``."""
        is_last = last is not None and last.name == self._until
        return 0.0 if is_last else float(self._config.data.stream_call["wait_hours"])

    def check_end(self, at: StreamUnit | None) -> str:
        """Return a warning if the last unit ``at`` has new files; DataError if ``until`` is another unit."""
        if self._until and at is not None and at.name != self._until:
            late = f"the unit after {at.name} was not complete within {self.wait_hours(at):g} hours"
            raise DataError(f"{self._until}: {late}; check data.stream")
        return "" if at is None else at.describe_added_files()


def concatenate(parts: Sequence[EncodedBlock]) -> EncodedBlock:
    """Concatenate the samples of one or more blocks, which all have targets and the same columns."""

    def join(arrays: Iterable[Any]) -> Any:
        present = [array for array in arrays if array is not None]
        return np.concatenate(present) if present else None

    bags = []
    for of_parts in zip(*(part.bags for part in parts), strict=True):
        lengths_B = join(np.diff(bag.offsets) for bag in of_parts)
        ids_L, weights_L = join(bag.ids_L for bag in of_parts), join(bag.weights_L for bag in of_parts)
        bags.append(EncodedBags(ids_L, np.append(0, lengths_B.cumsum()), weights_L))
    targets = zip(*(part.targets or () for part in parts), strict=True)
    dense_BF, ids_BK = join(part.dense_BF for part in parts), join(part.ids_BK for part in parts)
    return EncodedBlock(dense_BF, ids_BK, tuple(bags), Targets(*map(join, targets)))


class Lane:
    """The rows of a lane, from a position on.

    Args:
        blocks: the next blocks, each with the index of its segment in the lane.
    """

    def __init__(self, blocks: Iterator[tuple[int, EncodedBlock]], position: LanePosition) -> None:
        self._blocks, self.position = blocks, position
        self._ready: deque[tuple[int, EncodedBlock]] = deque()  # blocks that have been read ahead
        self._num_used = 0  # rows of the first of them that have been returned

    @property
    def num_ready(self) -> int:
        """The number of rows that are parsed and not yet returned."""
        return sum(samples.size for _, samples in self._ready) - self._num_used

    def read_ahead(self) -> bool:
        """Read the next block, if there is one; return whether a block is ready."""
        self._ready.extend(islice(self._blocks, 1))
        return bool(self._ready)

    def read_until(self, end: int) -> list[EncodedBlock]:
        """Return the next rows, up to row ``end`` of the lane, but at least one; [] after the last row."""
        parts: list[EncodedBlock] = []
        missing = max(1, end - self.position.num_returned)
        while missing and (self._ready or self.read_ahead()):
            segment, samples = self._ready[0]
            count = min(missing, samples.size - self._num_used)
            parts.append(samples.take(np.arange(self._num_used, self._num_used + count)))
            missing -= count
            self._num_used += count
            if self._num_used == samples.size:
                self._ready.popleft()
                self._num_used = 0
            row = self.position.row if segment == self.position.segment else 0
            self.position = LanePosition(segment, row + count, self.position.num_returned + count)
        return parts


class LaneReader:
    """Reads the batches of one trainer from a unit, from the unit's position on.

    Raises:
        ConfigError: a side table lacks a column, or shares one with another side table.
        DataError: a side table cannot be read, or the position is not valid for the unit.
        StorageError: a store refuses to send a side table, or the system refuses its path.
    """

    def __init__(
        self, config: RunConfig, encoder: FeatureEncoder, unit: StreamUnit, trainer: int, num_trainers: int
    ) -> None:
        self._config, self._encoder, self._unit = config, encoder, unit
        self._layout, self._spec = unit.layout(config), encoder.input_spec
        num_lanes = min(config.data.stream_call["lanes"], config.train.batch_size)
        segments = unit.segments(self._layout)
        of_lanes = [segments[lane::num_lanes] for lane in range(num_lanes)]
        is_parquet = config.data.format == "parquet"
        sizes = [sum(each.rows if is_parquet else each.size for each in lane) for lane in of_lanes]
        # After s steps, lanes 0 to l should have returned s * batch_size * ends[l] // ends[-1] rows.
        self._ends_L = np.cumsum(sizes, dtype=object)
        starts = unit.lanes or (LanePosition(),) * num_lanes
        fits = [at.segment <= len(lane) and min(at) >= 0 for at, lane in zip(starts, of_lanes, strict=False)]
        if len(starts) != num_lanes or not all(fits):
            rule = "resume with the lanes and files with which the run began"
            raise DataError(f"{unit.name}: the checkpoint has another number of lanes or segments; {rule}")
        own = range(trainer, num_lanes, num_trainers)
        self._logs = {lane: InvalidRowLog(config.data.max_invalid_fraction) for lane in own}
        self._lanes = {
            lane: Lane(self._blocks(lane, of_lanes[lane], starts[lane]), starts[lane]) for lane in own
        }
        self._positions = {unit.step: self._current()}

    def batches(self) -> BatchStream:
        """Return this trainer's batches. Their ``global_size`` counts only the samples of this trainer."""
        return BatchStream(self._read())

    def positions(self, step: int) -> dict[int, LanePosition]:
        """Map this trainer's lanes to positions after ``step`` steps; a lane that has ended is at its end."""
        return self._positions.get(step) or self._current()  # the lanes may end before those of others

    def invalid_rows(self) -> InvalidRowReport:
        """Return a report of the invalid rows read so far; DataError if a lane has too many of them."""
        return InvalidRowReport.merge([log.finish() for log in self._logs.values()])

    def _current(self) -> dict[int, LanePosition]:
        return {number: lane.position for number, lane in self._lanes.items()}

    def _read(self) -> Generator[Batch, None, None]:
        step = self._unit.step
        while True:
            step += 1
            rows = step * self._config.train.batch_size
            quotas_L = np.diff(rows * self._ends_L // max(1, self._ends_L[-1]), prepend=0)
            parts = [part for i, lane in self._lanes.items() for part in lane.read_until(quotas_L[i])]
            if not parts:
                return
            self._positions[step] = self._current()
            self._positions.pop(step - _KEPT_POSITIONS, None)
            yield block_batch(concatenate(parts), self._spec)
            # One lane a step reads ahead, so that no step waits until all lanes have parsed a block.
            behind = min(self._lanes.values(), key=lambda lane: lane.num_ready)
            if behind.num_ready < BLOCK_ROWS:
                behind.read_ahead()

    def _blocks(
        self, lane: int, segments: Sequence[Segment], position: LanePosition
    ) -> Iterator[tuple[int, EncodedBlock]]:
        """Yield (segment index, block) from ``position`` on; data.shuffle shuffles rows within a block."""
        skipped = position.row  # rows of the first segment that were returned before
        for index in range(position.segment, len(segments)):
            segment, start = segments[index], 0
            for number, table in enumerate(read_segment(segment, self._layout, BLOCK_ROWS, BLOCK_BYTES)):
                block, invalid = parse(segment.path, table, self._layout)
                self._logs[lane].add(segment.path, len(block.source_rows_B), invalid)
                samples = self._encoder.encode(block)
                order = np.arange(samples.size)
                if self._config.data.is_shuffled:
                    key = self._config.run.seed, self._unit.number, lane, index, number
                    order = np.random.default_rng(key).permutation(samples.size)
                order = order[max(0, skipped - start) :]
                if len(order):
                    yield index, samples.take(order)
                start += samples.size
            skipped = 0


def fit_on_blocks(config: RunConfig, blocks: Iterable[RawBlock]) -> FeatureEncoder:
    """Return an encoder whose scaling and quantiles are fitted on ``blocks``, a sample of a stream.

    Raise DataError if the blocks have no rows; errors of the iterator ``blocks`` pass through.
    """
    layout = stream_layout(config)
    return fit_encoder(layout, config.tables, FittedStatistics.of_all(blocks, layout), {})


def with_scaling_of(config: RunConfig, before: FeatureEncoder, encoder: FeatureEncoder) -> FeatureEncoder:
    """Return ``encoder`` with the fitted scaling of ``before`` in columns with the same argument ``log``."""
    known = {(each.name, each.transform): each for each in before.dense}
    dense = tuple(
        known.get((each.name, each.transform), each) if column.scaling.name in FITTED_SCALINGS else each
        for column, each in zip(stream_layout(config).dense, encoder.dense, strict=True)
    )
    return replace(encoder, dense=dense)
