"""A trainer's batches, read ahead in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from hybrid.batch import Batch, share
from hybrid.data.order import ShuffledOrder
from hybrid.data.storage import PreparedDataset
from hybrid.errors import DataError

READ_TIMEOUT_SECONDS = 120.0
JOIN_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class BatchLoader:
    """Cuts a data set into global batches and reads one trainer's share of each.

    Step ``s`` of an epoch is ``order[s * batch_size : (s + 1) * batch_size]``, the same samples in the same
    order for any number of trainers; each takes a contiguous share, and shares differ by one at most. The
    last batch may be smaller, and a share of it empty.

    Attributes:
        dataset: the split to read.
        batch_size: samples of a step over all trainers.
        trainer_index, num_trainers: whose share.
        seed: of the shuffle.
        shuffle: draw a new order each epoch; otherwise rows come as they are.
        prefetch_batches: how many batches are read ahead.
    """

    dataset: PreparedDataset
    _: KW_ONLY
    batch_size: int
    trainer_index: int = 0
    num_trainers: int = 1
    seed: int = 0
    shuffle: bool = False
    prefetch_batches: int = 2

    @property
    def steps_per_epoch(self) -> int:
        """Steps that pass over every sample once."""
        return -(-self.dataset.num_samples // self.batch_size)

    def batches(self, epoch: int, first_step: int = 0) -> BatchStream:
        """The batches of ``epoch`` from ``first_step`` on; close the stream, or use it in a ``with``."""
        order: Callable[[int, int], npt.NDArray[np.int64]] = np.arange
        if self.shuffle:
            order = ShuffledOrder(self.dataset.num_samples, self.seed, epoch).indices

        def read(step: int) -> Batch:
            first = step * self.batch_size
            size = min(self.batch_size, self.dataset.num_samples - first)
            start, stop = share(size, self.trainer_index, self.num_trainers)
            rows = order(first, first + size)
            return self.dataset.gather(rows[start:stop], size, self.dataset.total_weights(rows))

        return BatchStream(read, range(first_step, self.steps_per_epoch), self.prefetch_batches)


class BatchStream(Iterator[Batch]):
    """Batches read by a thread of its own, at most ``depth`` ahead of the one that takes them.

    An error in the thread is raised where the batch is taken. ``close`` ends the thread at once.
    """

    def __init__(self, read: Callable[[int], Batch], steps: range, depth: int) -> None:
        self._read = read
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
                f"no batch in {READ_TIMEOUT_SECONDS:.0f} s; check the disk of data.cache_folder"
            ) from None
        if isinstance(item, Batch):
            self._free.release()
            return item
        self.close()
        raise item

    def close(self) -> None:
        """End the reading thread; taking a further batch gives none."""
        self._closed.set()
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
