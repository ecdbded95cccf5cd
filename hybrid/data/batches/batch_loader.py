"""A trainer's batches, read ahead in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Self

from hybrid.batch import Batch, slice_bounds
from hybrid.data.dataset.group_order import GroupedOrder, check_group_sizes
from hybrid.data.dataset.prefetch import Ahead, AtHand, StepRows
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.sample_order import FileOrder, LaneOrder, Order, ShuffledOrder
from hybrid.errors import DataError
from hybrid.primitives.grouping import whole_bounds

READ_TIMEOUT_SECONDS = 120.0
JOIN_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class BatchLoader:
    """Cuts a data set into global batches and reads one trainer's share of each.

    Step ``s`` of an epoch has the rows ``order.indices(s * batch_size, (s + 1) * batch_size)``, the same in
    the same order for any number of trainers; each takes a contiguous share, and shares differ by one at
    most. The last batch may be smaller, and a share of it empty.

    By group, ``order`` is one of whole groups, and a group belongs to the step, and to the share, in whose
    range its last sample lies. There are as many steps, none of them empty; they and shares differ by as much
    as a group more, and any share may be empty.

    Attributes:
        dataset: the split to read.
        batch_size: samples of a step over all trainers.
        trainer_index, num_trainers: whose share.
        seed: of the shuffle.
        shuffle: draw a new order each epoch; otherwise rows come as they are.
        lanes: by how many of them rows are shuffled (hybrid/data/dataset/sample_order.py); 0 for none.
        prefetch_batches: how many batches are read ahead.
        by_group: whether groups stay whole.

    Raises:
        DataError: they cannot.
    """

    dataset: PreparedDataset
    _: KW_ONLY
    batch_size: int
    trainer_index: int = 0
    num_trainers: int = 1
    seed: int = 0
    shuffle: bool = False
    lanes: int = 0
    prefetch_batches: int = 2
    by_group: bool = False

    def __post_init__(self) -> None:
        if self.by_group:
            if self.lanes:
                raise DataError("whole groups are not shuffled by lanes: set data.shuffle to rows")
            check_group_sizes(self.dataset, self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that pass over every sample once."""
        return -(-self.dataset.num_samples // self.batch_size)

    def batches(self, epoch: int, first_step: int = 0) -> BatchStream:
        """The batches of ``epoch`` from ``first_step`` on; close the stream, or use it in a ``with``."""
        steps = range(first_step, self.steps_per_epoch)
        ahead = self._ahead_by_group(epoch) if self.by_group else self._ahead(epoch, steps)
        return BatchStream(lambda step: self._gather(ahead(step)), steps, self.prefetch_batches, ahead.close)

    def _gather(self, step: StepRows) -> Batch:
        """This trainer's share of a step."""
        dataset = self.dataset
        total_groups = dataset.total_groups(step.rows) if self.by_group else None
        return dataset.gather(step.own, len(step.rows), dataset.total_weights(step.rows), total_groups)

    def _ahead(self, epoch: int, steps: range) -> Ahead:
        order = self._order(self.dataset.num_samples, epoch)

        def plan(step: int) -> StepRows:
            first = step * self.batch_size
            size = min(self.batch_size, self.dataset.num_samples - first)
            rows = order.indices(first, first + size)
            return StepRows(rows, *slice_bounds(size, self.trainer_index, self.num_trainers))

        chunks_at_once = order.chunks_at_once(self.batch_size, self.num_trainers)
        return self.dataset.ahead(plan, steps, chunks_at_once)

    def _ahead_by_group(self, epoch: int) -> Ahead:
        dataset = self.dataset
        assert dataset.group_starts is not None, "check_group_sizes has seen them"
        num_groups = len(dataset.group_starts) - 1
        order = GroupedOrder(dataset, self._order(num_groups, epoch).indices(0, num_groups))

        def plan(step: int) -> StepRows:
            rows, ends = order.indices(step * self.batch_size, (step + 1) * self.batch_size)
            even = slice_bounds(len(rows), self.trainer_index, self.num_trainers)
            return StepRows(rows, *whole_bounds(ends, *even))

        return AtHand(plan)

    def _order(self, number: int, epoch: int) -> Order:
        """The numbers below ``number`` in the order of an epoch."""
        if not self.shuffle:
            return FileOrder()
        if self.lanes:
            return LaneOrder(self.lanes, number, self.seed, epoch)
        return ShuffledOrder(number, self.seed, epoch)


class BatchStream(Iterator[Batch]):
    """Batches read by a thread of its own, at most ``depth`` ahead of the one that takes them.

    ``end_reading`` has ``read`` return, or raise, at once.

    An error in the thread is raised where the batch is taken. ``close`` ends the thread at once.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        steps: range,
        depth: int,
        end_reading: Callable[[], object] = lambda: None,
    ) -> None:
        self._read = read
        self._end_reading = end_reading
        self._steps = steps
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch reader", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        try:
            item = self._ready.get(timeout=READ_TIMEOUT_SECONDS)
        except queue.Empty:
            self.close()
            raise DataError(
                f"no batch in {READ_TIMEOUT_SECONDS:.0f} s; "
                "check the disk, or the store, of data.cache_folder"
            ) from None
        if isinstance(item, Batch):
            self._free.release()
            return item
        self.close()
        raise item

    def close(self) -> None:
        """End the reading thread; taking a further batch gives none."""
        self._closed.set()
        self._end_reading()
        self._free.release()
        self._thread.join(timeout=JOIN_TIMEOUT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            for step in self._steps:
                self._free.acquire()
                if self._closed.is_set():
                    return
                self._ready.put(self._read(step))
            self._ready.put(StopIteration())
        except BaseException as error:  # handed to whoever takes the batches
            self._ready.put(error)
