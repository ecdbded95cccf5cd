"""A trainer's batches, read ahead in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Self

from hybrid.batch import Batch, slice_bounds
from hybrid.data.dataset.group_order import GroupedOrder, check_group_sizes
from hybrid.data.dataset.prepared_dataset import PreparedDataset, StepPlan, StepRows
from hybrid.data.dataset.sample_order import FileOrder, LaneOrder, Order, ShuffledOrder
from hybrid.errors import DataError
from hybrid.primitives.grouping import whole_bounds

READ_TIMEOUT_SECONDS = 120.0
JOIN_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class BatchLoader:
    """Divides a data set into global batches and reads one trainer's slice of each.

    Step ``s`` of an epoch has the rows ``order.indices(s * batch_size, (s + 1) * batch_size)``, the same in
    the same order for any number of trainers. Each trainer takes a contiguous slice; slices differ by one row
    at most. The last batch may be smaller, and a slice of it empty.

    By group, ``order`` is an order of complete groups. A group belongs to the step, and to the slice, in
    whose range its last sample lies. There are as many steps, none of them empty. Steps and slices differ by
    up to a group more, and a slice may be empty.

    Attributes:
        dataset: the split to read.
        batch_size: samples of a step over all trainers.
        trainer_index, num_trainers: whose slice.
        seed: of the shuffle.
        shuffle: whether to draw a new order each epoch; otherwise rows come in file order.
        lanes: of the shuffle (hybrid/data/dataset/sample_order.py); 0 for none.
        prefetch_batches: how many batches are read ahead.
        by_group: whether groups stay complete.

    Raises:
        DataError: groups cannot stay complete.
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
                raise DataError("complete groups are not shuffled by lanes: set data.shuffle to rows")
            check_group_sizes(self.dataset, self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that pass over every sample once."""
        return -(-self.dataset.num_samples // self.batch_size)

    def batches(self, epoch: int, first_step: int = 0) -> BatchStream:
        """Return the batches of an epoch from ``first_step`` on; close them, or use a ``with``."""
        steps = range(first_step, self.steps_per_epoch)
        dataset, batch_size, slices = self.dataset, self.batch_size, (self.trainer_index, self.num_trainers)
        if self.by_group:
            assert dataset.group_starts is not None, "check_group_sizes comes first"
            num_groups = len(dataset.group_starts) - 1
            groups = GroupedOrder(dataset, self._order(num_groups, epoch).indices(0, num_groups))

            def plan_groups(step: int) -> StepRows:
                rows, ends = groups.indices(step * batch_size, (step + 1) * batch_size)
                return StepRows(rows, *whole_bounds(ends, *slice_bounds(len(rows), *slices)))

            step_plan = StepPlan(plan_groups)
        else:
            order = self._order(dataset.num_samples, epoch)

            def plan_rows(step: int) -> StepRows:
                rows = order.indices(step * batch_size, min((step + 1) * batch_size, dataset.num_samples))
                return StepRows(rows, *slice_bounds(len(rows), *slices))

            chunks_at_once = order.chunks_at_once(batch_size, self.num_trainers)
            step_plan = dataset.plan_steps(plan_rows, steps, chunks_at_once)

        def read(step: int) -> Batch:
            planned = step_plan(step)
            total_groups = dataset.total_groups(planned.rows) if self.by_group else None
            weights = dataset.total_weights(planned.rows)
            return dataset.gather(planned.own, len(planned.rows), weights, total_groups)

        return BatchStream(read, steps, self.prefetch_batches, step_plan.close)

    def _order(self, number: int, epoch: int) -> Order:
        """Return the order of the numbers below ``number`` in an epoch."""
        if not self.shuffle:
            return FileOrder()
        if self.lanes:
            return LaneOrder(self.lanes, number, self.seed, epoch)
        return ShuffledOrder(number, self.seed, epoch)


class BatchStream(Iterator[Batch]):
    """Batches that a thread reads, at most ``depth`` ahead of the consumer.

    An error in the thread is raised where the batch is taken. ``close`` ends the thread at once.

    Args:
        end_reading: makes ``read`` return, or raise, at once.
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
            rule = "check the disk, or the store, of data.cache_folder"
            raise DataError(f"no batch in {READ_TIMEOUT_SECONDS:.0f} s; {rule}") from None
        if isinstance(item, Batch):
            self._free.release()
            return item
        self.close()
        raise item

    def close(self) -> None:
        """End the reading thread; there are no further batches."""
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
        except BaseException as error:  # handed to the consumer
            self._ready.put(error)
