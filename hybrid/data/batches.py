"""The batches of a trainer: its slice of each step, read ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hybrid.batch import Batch, padding_bounds, slice_bounds
from hybrid.config import TaskSection
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import item_positions
from hybrid.errors import ConfigError, DataError

Rows: TypeAlias = npt.NDArray[np.int64]

READ_TIMEOUT_SECONDS = 120.0
READ_AHEAD = 2  # batches that a trainer's thread reads before they are used
JOIN_TIMEOUT_SECONDS = 5.0
CHUNK_ROWS = 4096
WINDOW_CHUNKS = 256
_CHUNK_STREAM, _WINDOW_STREAM, _LANE_STREAM = range(3)
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are evenly spread


def check_ranking_losses(tasks: Mapping[str, TaskSection], dataset: PreparedDataset, batch_size: int) -> None:
    """Raise ConfigError if labels, or DataError if groups, do not suit the ranking loss of a task."""
    for (name, task), labels in zip(tasks.items(), dataset.report.labels, strict=True):
        if task.ranking_loss.startswith("listwise") and labels.lowest is not None and labels.lowest < 0:
            rule = f"takes labels of at least 0, and a training row has {labels.lowest:g}; try pairwise"
            raise ConfigError(f"tasks.{name}.ranking_loss", rule, task.ranking_loss)
    if any(task.ranking_loss for task in tasks.values()):
        check_group_sizes(dataset, batch_size)


def check_group_sizes(dataset: PreparedDataset, batch_size: int) -> None:
    """Raise DataError if ``dataset`` has no groups, is not the split "train", or a group exceeds a batch."""
    if dataset.group_starts is None:
        raise DataError("batches of complete groups need training rows and data.group")
    largest = int(np.diff(dataset.group_starts).max(initial=0))
    if largest > batch_size:
        raise DataError(
            f"the largest group of data.group has {largest:,} training rows, more than a batch of "
            f"{batch_size:,}, which has complete groups: raise train.batch_size, or `size` in a custom loop"
        )


@dataclass(frozen=True)
class BatchLoader:
    """Divides a data set into global batches and reads one trainer's slice of each.

    An epoch has an order of all rows. Step ``s`` has the rows at the positions ``s * batch_size`` to
    ``(s + 1) * batch_size - 1`` of this order, for any number of trainers. Each trainer takes a contiguous
    slice, and the sizes of slices differ by at most one row. The last step may be smaller, with empty slices,
    unless ``drop_last`` skips it. Slices below ``min_size`` are padded with other rows of their step.

    With ``by_group``, the rows of a group are adjacent in this order. The position of a group's last row
    determines its step and slice. There are as many steps as without groups, and no step is empty.
    The sizes of steps and slices may differ by a group, and a slice may be empty.

    With ``by_group``, raise DataError if ``lanes`` is not 0 or :func:`check_group_sizes` fails.
    """

    dataset: PreparedDataset
    _: KW_ONLY
    batch_size: int  # samples of a step over all trainers
    # trainer_index, num_trainers: index of this trainer, and number of slices.
    trainer_index: int = 0
    num_trainers: int = 1
    seed: int = 0
    shuffle: bool = False  # whether to draw a new order each epoch; otherwise rows come in file order
    lanes: int = 0  # the number of lanes of the shuffle (ShuffledOrder); 0 for none
    by_group: bool = False  # whether groups stay complete
    min_size: int = 0  # of a slice; a smaller one is padded with other samples of the step
    drop_last: bool = False  # whether to leave out the samples of a smaller last step

    def __post_init__(self) -> None:
        if self.by_group:
            if self.lanes:
                raise DataError("complete groups are not shuffled by lanes: set data.shuffle to rows")
            check_group_sizes(self.dataset, self.batch_size)

    def batches(self, epoch: int, first: int = 0) -> BatchStream:
        """Return this trainer's slices of the steps of an epoch; the caller closes the stream.

        Args:
            first: position of the first sample to read, in the order of the epoch. If it is not the first
                sample of a step, this step is smaller.
        """
        size, end = self.batch_size, self.dataset.num_samples
        end -= end % size if self.drop_last else 0
        ranges = pairwise([first, *range(first - first % size + size, end, size), end] if first < end else [])
        steps: Iterator[tuple[Rows, Rows | None]]
        if self.by_group:
            assert self.dataset.group_starts is not None, "check_group_sizes comes first"
            num_groups = len(self.dataset.group_starts) - 1
            steps = group_steps(self.dataset, self._order(num_groups, epoch)(0, num_groups), ranges)
        else:
            order = self._order(self.dataset.num_samples, epoch)
            steps = ((order(*each), None) for each in ranges)
        return BatchStream(self._read(steps))

    def _read(self, steps: Iterator[tuple[Rows, Rows | None]]) -> Generator[Batch, None, None]:
        for rows, ends_G in steps:
            if not len(rows):  # a resumed pass may begin after the groups of a step
                continue
            start, stop = slice_bounds(len(rows), self.trainer_index, self.num_trainers, ends_G)
            local = rows[start:stop]
            first, last = padding_bounds(len(rows), start, stop, self.min_size)
            if first < last:
                local = np.concatenate([local, rows[first:last]])
            yield self.dataset.gather(local, len(rows))._replace(
                local_size=stop - start,
                total_weights=self.dataset.total_weights(rows),
                total_ranking_weights=self.dataset.total_ranking_weights(rows) if self.by_group else None,
            )

    def _order(self, number: int, epoch: int) -> Callable[[int, int], Rows]:
        return ShuffledOrder(number, self.seed, epoch, self.lanes).indices if self.shuffle else np.arange


def group_steps(
    dataset: PreparedDataset, groups_G: Rows, ranges: Iterable[tuple[int, int]]
) -> Iterator[tuple[Rows, Rows]]:
    """Yield, for each step of complete groups, the rows of its groups, and where each group ends in them.

    ::

        rows of the file         0 a | 1 b | 2 a | 3 c | 4 b
        group_rows.npy           0 2 | 1 4 | 3                groups in the order of their first rows
        groups permuted          1 4 | 3 | 0 2                if shuffled, anew in each epoch
        steps of three rows      1 4 3 | 0 2                  a group is in the step of its last position

    Args:
        groups_G: a permutation of the group indices, which is the order of the groups in the epoch.
        ranges: the start and the stop of the positions of each step.
    """
    assert dataset.group_rows is not None
    assert dataset.group_starts is not None
    ends_G = np.diff(dataset.group_starts)[groups_G].cumsum()
    for start, stop in ranges:
        first, last = ends_G.searchsorted([start, stop], side="right")
        positions_B, sizes = item_positions(dataset.group_starts, groups_G[first:last])
        yield dataset.group_rows[positions_B], sizes.cumsum()


class BatchStream(Iterator[Batch], AbstractContextManager["BatchStream"]):
    """Batches that a thread reads from a generator, at most ``READ_AHEAD`` before they are used.

    ``next`` raises the error of the generator, or DataError if no batch arrives in 120 s. After an error,
    there are no further batches. The thread closes the generator.

    Args:
        is_over: an event that ``close`` sets. A generator that waits for rows must end once it is set.
    """

    def __init__(self, batches: Generator[Batch, None, None], is_over: threading.Event | None = None) -> None:
        self._batches = batches
        self._is_over = is_over or threading.Event()
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._free = threading.Semaphore(READ_AHEAD)
        self._thread = threading.Thread(target=self._run, name="batch reader", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._is_over.is_set():
            raise StopIteration
        try:
            item = self._ready.get(timeout=READ_TIMEOUT_SECONDS)
        except queue.Empty:
            self.close()
            rule = "check the disk of data.cache_folder, or data.stream"
            raise DataError(f"no batch in {READ_TIMEOUT_SECONDS:.0f} s; {rule}") from None
        if isinstance(item, Batch):
            self._free.release()
            return item
        self.close()
        raise item

    def close(self) -> None:
        """Stop the thread, and discard batches read ahead; wait at most 5 s for a batch in progress."""
        self._is_over.set()
        self._free.release()
        self._thread.join(timeout=JOIN_TIMEOUT_SECONDS)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            with closing(self._batches):
                while True:
                    self._free.acquire()
                    if self._is_over.is_set():
                        return
                    self._ready.put(next(self._batches))
        except BaseException as error:  # ``next`` raises it; StopIteration marks the end of the batches
            self._ready.put(error)


class ShuffledOrder:
    """An exact shuffle of the rows 0 .. ``num_rows`` - 1 with random access.

    A permutation of billions of rows in every trainer would be wasteful, so the shuffle has two levels::

        chunks of 4096 rows     | c0 | c1 | c2 | c3 | c4 | ...
        chunks permuted         | c3 | c0 | c4 | c2 | c1 | ...
        rows permuted           |<- 256 chunks: a window ->|<- window

    Every row occurs exactly once per epoch, the order depends only on the arguments, and only the current
    window is in memory. Up to 2**20 rows are one window, and are shuffled completely.

    A trainer's slice of a step may have any rows of a window, so all trainers read nearly all chunks. With
    lanes, the rows of a window are divided among a number of lanes, and each lane is shuffled::

        chunks permuted         | c3 | c0 | c4 | c2 | ...
        lanes                   |  lane 0 |  lane 1 | ...    the same rows for any number of trainers
        a step                  rows of lane 0, as many of lane 1, ...

    A slice of a step is contiguous, so it has rows of few lanes. A trainer reads only the chunks of these
    lanes. If a step has fewer rows than there are lanes, it takes them from lanes that are far apart.

    Args:
        num_lanes: number of lanes; 0 for a shuffle without lanes.
    """

    def __init__(self, num_rows: int, seed: int, epoch: int, num_lanes: int = 0) -> None:
        self._num_rows = num_rows
        self._key = (seed, epoch)
        self._has_lanes = num_lanes > 0
        # A permutation: the first p positions of an epoch have (p + turn) // L rows of a lane, p in all.
        self._turns_L = np.argsort(np.argsort(np.arange(max(1, num_lanes)) * _GOLDEN % 1.0))
        rng = np.random.default_rng((*self._key, _CHUNK_STREAM))
        self._chunks = rng.permutation(-(-num_rows // CHUNK_ROWS))
        sizes = np.minimum(num_rows - self._chunks * CHUNK_ROWS, CHUNK_ROWS)
        self._window_starts = np.append((sizes.cumsum() - sizes)[::WINDOW_CHUNKS], num_rows)
        self._window = -1  # index of the last window
        self._lanes: list[Rows] = []  # the rows of its lanes

    def indices(self, start: int, stop: int) -> Rows:
        """Return the rows of a step, which has the positions ``start`` .. ``stop`` - 1 of the epoch.

        The rows of lane 0 come first, then those of lane 1, and so on.
        """
        of_windows = [[np.empty(0, np.int64)] * len(self._turns_L)]
        while start < stop:
            window = int(self._window_starts.searchsorted(start, side="right")) - 1
            first, last = self._window_starts[window : window + 2].tolist()
            if window != self._window:
                self._window, self._lanes = window, self._shuffled_lanes(window, first, last)
            end = min(stop, last)
            bounds = (self._count_rows_L(at) - self._count_rows_L(first) for at in (start, end))
            of_windows.append([rows[a:b] for rows, a, b in zip(self._lanes, *bounds, strict=True)])
            start = end
        return np.concatenate([rows for of_lane in zip(*of_windows, strict=True) for rows in of_lane])

    def _shuffled_lanes(self, window: int, first: int, last: int) -> list[Rows]:
        chunks = self._chunks[window * WINDOW_CHUNKS : (window + 1) * WINDOW_CHUNKS]
        rows = (chunks[:, None] * CHUNK_ROWS + np.arange(CHUNK_ROWS)).reshape(-1)
        ends_L = (self._count_rows_L(last) - self._count_rows_L(first)).cumsum()
        lanes = np.split(rows[rows < self._num_rows], ends_L[:-1])
        for lane, of_lane in enumerate(lanes):
            stream = (_LANE_STREAM, window, lane) if self._has_lanes else (_WINDOW_STREAM, window)
            np.random.default_rng((*self._key, *stream)).shuffle(of_lane)
        return lanes

    def _count_rows_L(self, position: int) -> npt.NDArray[np.int64]:
        return (position + self._turns_L) // len(self._turns_L)
