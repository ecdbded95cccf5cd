"""The lanes of a unit (a file or folder of a stream): which rows a step has, and which trainer reads them.

::

    segments of the unit      s0  s1  s2  s3  s4  s5  s6        in the order of files
    lanes (here three)        lane 0: s0 s3 s6 | lane 1: s1 s4 | lane 2: s2 s5
    trainers (here two)       trainer 0: lanes 0, 2            | trainer 1: lane 1

A step takes rows from every lane that has not ended, in proportion to the size of the lane in the unit. So
all lanes end at about the same step. The lanes do not depend on the number of trainers, so the rows of a step
do not, either. A trainer parses only its lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hybrid.batch import Batch
from hybrid.config import RunConfig
from hybrid.data.batches import BatchStream
from hybrid.data.dataset.prepared_dataset import block_batch
from hybrid.data.encode.feature_encoder import EncodedBags, EncodedBlock, FeatureEncoder
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import Segment, parse, read_segment
from hybrid.data.stream.units import BLOCK_BYTES, BLOCK_ROWS, LanePosition, StreamUnit
from hybrid.data.values.invalid_rows import InvalidRowLog, InvalidRowReport
from hybrid.data.values.model_columns import Targets
from hybrid.errors import DataError

# A trainer reads at most 2 batches ahead (BatchStream), and prefetches the lookups of at most 2 more.
_KEPT_POSITIONS = 16


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
    """The rows of a lane, from a position on. With data.shuffle, the rows of each block are shuffled.

    Args:
        key: the number of the unit, and the lane; the shuffle depends on both.
        layout: the columns of the unit.

    Attributes:
        log: the invalid rows that have been read.
        num_ready: the number of rows that are parsed and not yet returned.
    """

    def __init__(
        self,
        config: RunConfig,
        encoder: FeatureEncoder,
        key: tuple[int, int],
        segments: Sequence[Segment],
        position: LanePosition,
        layout: Layout,
    ) -> None:
        self._config, self._encoder, self._key = config, encoder, key
        self._segments, self._layout, self.position = segments, layout, position
        self.log = InvalidRowLog(config.data.max_invalid_fraction)
        self.num_ready = 0
        # Blocks that are read: the segment, the row of the segment at which the block starts, the block.
        self._ready: deque[tuple[int, int, EncodedBlock]] = deque()
        self._blocks = self._read()

    def read_ahead(self) -> bool:
        """Read the next block; return False if there is none."""
        block = next(self._blocks, None)
        if block is not None:
            self._ready.append(block)
            _, _, samples = block
            self.num_ready += samples.size
        return block is not None

    def read_until(self, end: int) -> list[EncodedBlock]:
        """Return the rows before row ``end`` of the lane, and at least one; [] at the end of the lane."""
        parts: list[EncodedBlock] = []
        missing = max(1, end - self.position.num_returned)
        while missing and (self._ready or self.read_ahead()):
            segment, start, samples = self._ready[0]
            row = self.position.row if segment == self.position.segment else start
            first = row - start
            count = min(missing, samples.size - first)
            parts.append(samples.take(np.arange(first, first + count)))
            if first + count == samples.size:
                self._ready.popleft()
            missing -= count
            self.num_ready -= count
            self.position = LanePosition(segment, row + count, self.position.num_returned + count)
        return parts

    def _read(self) -> Iterator[tuple[int, int, EncodedBlock]]:
        layout = self._layout
        first_segment, skipped, _ = self.position  # some rows of this segment were returned before
        for index in range(first_segment, len(self._segments)):
            segment, start = self._segments[index], 0
            for number, table in enumerate(read_segment(segment, layout, BLOCK_ROWS, BLOCK_BYTES)):
                block, invalid = parse(segment.path, table, layout)
                self.log.add(segment.path, len(block.source_rows_B), invalid)
                samples = self._encoder.encode(block)
                order = np.arange(samples.size)
                if self._config.data.is_shuffled:
                    rng = np.random.default_rng([self._config.run.seed, *self._key, index, number])
                    order = rng.permutation(samples.size)
                first, end = max(start, skipped), start + samples.size
                if end > skipped:
                    yield index, first, samples.take(order[first - start :])
                start = end
            skipped = 0


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
        self._spec = encoder.input_spec
        self._first_step = unit.step
        layout = unit.layout(config)
        num_lanes = min(config.data.stream_call["lanes"], config.train.batch_size)
        segments = unit.segments(layout)
        of_lanes = [segments[lane::num_lanes] for lane in range(num_lanes)]
        is_parquet = config.data.format == "parquet"
        sizes = [sum(each.rows if is_parquet else each.size for each in lane) for lane in of_lanes]
        # After s steps, lanes 0 to l should have returned s * batch_size * ends[l] / ends[-1] rows.
        self._ends_L = np.cumsum(sizes, dtype=object)
        self._batch_size = config.train.batch_size
        starts = unit.lanes or (LanePosition(),) * num_lanes
        fits = [at.segment <= len(lane) and min(at) >= 0 for at, lane in zip(starts, of_lanes, strict=False)]
        if len(starts) != num_lanes or not all(fits):
            rule = "resume with the lanes and files with which the run began"
            raise DataError(f"{unit.name}: the checkpoint has another number of lanes or segments; {rule}")
        self._lanes = {
            lane: Lane(config, encoder, (unit.number, lane), of_lanes[lane], starts[lane], layout)
            for lane in range(trainer, num_lanes, num_trainers)
        }
        self._positions = {unit.step: self._current()}

    def batches(self) -> BatchStream:
        """Return this trainer's batches. ``Batch.global_size`` is the size on this trainer only."""
        return BatchStream(self._read())

    def positions(self, step: int) -> dict[int, LanePosition]:
        """Return the position of each lane of this trainer after ``step`` steps, or at the lanes' ends."""
        return self._positions.get(step) or self._current()  # the lanes may end before those of others

    def invalid_rows(self) -> InvalidRowReport:
        """Return the invalid rows read so far; DataError if a lane has too many."""
        return InvalidRowReport.merge([lane.log.finish() for lane in self._lanes.values()])

    def _current(self) -> dict[int, LanePosition]:
        return {number: lane.position for number, lane in self._lanes.items()}

    def _read(self) -> Generator[Batch, None, None]:
        step = self._first_step
        while parts := [part for lane, end in self._quotas(step + 1) for part in lane.read_until(end)]:
            step += 1
            self._positions[step] = self._current()
            self._positions.pop(step - _KEPT_POSITIONS, None)
            yield block_batch(concatenate(parts), self._spec)
            # One lane a step reads ahead, so that no step waits until all lanes have parsed a block.
            behind = min(self._lanes.values(), key=lambda lane: lane.num_ready)
            if behind.num_ready < BLOCK_ROWS:
                behind.read_ahead()

    def _quotas(self, step: int) -> list[tuple[Lane, int]]:
        """Return each lane with the number of rows that it should have returned after ``step`` steps."""
        ends = [0, *(step * self._batch_size * end // max(1, self._ends_L[-1]) for end in self._ends_L)]
        return [(lane, ends[number + 1] - ends[number]) for number, lane in self._lanes.items()]
