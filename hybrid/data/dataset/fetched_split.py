"""A split of a prepared data set in a store: rows of coming steps are fetched before they are gathered."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.data.dataset.chunk_cache import ChunkCache
from hybrid.data.dataset.dataset_manifest import DatasetReport
from hybrid.data.dataset.prepared_dataset import PreparedDataset, StepPlan, StepRows
from hybrid.data.dataset.sample_order import CHUNK_ROWS, WINDOW_CHUNKS
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import InputSpec

_AHEAD_ROWS = 2 * WINDOW_CHUNKS * CHUNK_ROWS  # of all trainers: this window, and the next
_WAIT_SECONDS = 110.0  # less than a reader waits for a batch


class FetchedDataset(PreparedDataset):
    """A split whose rows are in the cache while a step of :meth:`plan_steps` needs them.

    Groups are not known as a whole, so it has no batches of complete groups.

    Args:
        samples: the rows.
        weights: the weights of the samples, if they differ: every trainer needs those of the whole step.
        cache_fraction: the fraction of data.local_cache_gb that the rows may take.
        total_ids: of each multi-hot feature.
        read_source_rows: reads the input row of each sample.
    """

    def __init__(
        self,
        samples: ChunkCache,
        weights: ChunkCache | None,
        cache_fraction: float,
        total_ids: Sequence[int],
        read_source_rows: Callable[[], npt.NDArray[np.int64]],
        input_spec: InputSpec,
        report: DatasetReport,
    ) -> None:
        super().__init__(samples.arrays, input_spec, report)
        self._samples, self._all_weights = samples, weights
        self._cache_fraction = cache_fraction
        self._total_ids = total_ids
        self._read_source_rows = read_source_rows

    @cached_property
    def source_rows(self) -> npt.NDArray[np.int64]:
        """See :class:`PreparedDataset`; fetched at the first use."""
        return self._read_source_rows()

    @property
    def total_ids(self) -> Sequence[int]:
        return self._total_ids

    @property
    def bytes_fetched(self) -> int:
        """Bytes that were fetched since it was opened."""
        weights = 0 if self._all_weights is None else self._all_weights.bytes_fetched
        return self._samples.bytes_fetched + weights

    def plan_steps(self, plan: Callable[[int], StepRows], steps: range, chunks_at_once: int) -> StepPlan:
        """See :class:`PreparedDataset`.

        Raises:
            ConfigError: the cache is too small for so many chunks.
        """
        needed = min(chunks_at_once, self._samples.num_chunks)
        if needed > self._samples.num_slots:
            gib = needed * self._samples.slot_bytes / 2**30 / self._cache_fraction
            rule = (
                f"must be at least {math.ceil(gib * 100) / 100:g}, for the rows that a trainer reads at once"
            )
            raise ConfigError("data.local_cache_gb", rule)
        return _FetchedSteps(plan, steps, self._samples, self._all_weights)

    def close(self) -> None:
        self._samples.close()
        if self._all_weights is not None:
            self._all_weights.close()

    def total_weights(self, rows: npt.NDArray[np.int64]) -> Tensor | None:
        """See :class:`PreparedDataset`; of the rows of a step."""
        if self._all_weights is None:
            return None
        weights = self._all_weights.arrays["weights"]
        return torch.from_numpy(weights.take(self._all_weights.local(rows), axis=0).sum(0, dtype=np.float64))

    def gather(
        self,
        rows: npt.NDArray[np.int64],
        global_size: int,
        total_weights: Tensor | None = None,
        total_groups: Tensor | None = None,
    ) -> Batch:
        """See :class:`PreparedDataset`; of a trainer's slice of a step."""
        return super().gather(self._samples.local(rows), global_size, total_weights, total_groups)


class _PlannedStep(NamedTuple):
    """A step, and for each cache the chunks of its rows."""

    rows: StepRows
    chunks: list[set[int]]


class _FetchedSteps(StepPlan):
    """Fetches the chunks of the coming steps, as many as the cache has room for, in their order.

    The chunks of a step are pinned as soon as the cache has room for them beside all earlier steps, and
    released when the next step is requested. So a step never waits for room that a later step takes.

    Args:
        plan: returns the rows of a step.
        steps: that will be requested.
        samples: the cache of the rows of a trainer's slice.
        weights: the cache of the weights of all rows of a step.
    """

    def __init__(
        self,
        plan: Callable[[int], StepRows],
        steps: range,
        samples: ChunkCache,
        weights: ChunkCache | None,
    ) -> None:
        super().__init__(plan)
        self._to_plan = deque(steps)
        self._caches = [samples] if weights is None else [samples, weights]
        self._next: _PlannedStep | None = None  # there was no room for it
        self._planned: deque[_PlannedStep] = deque()
        self._held: _PlannedStep | None = None
        self._num_ahead = 0
        self._is_over = threading.Event()
        self._lock = samples.lock

    def __call__(self, step: int) -> StepRows:
        """See :class:`StepPlan`.

        Raises:
            DataError: there is no room for the rows of a step, or they cannot be fetched.
        """
        with self._lock:
            self._release()
            while not self._is_over.is_set() and self._plan_next():
                pass
            if self._is_over.is_set():
                raise DataError("reading was ended")
            self._held = held = self._planned.popleft()
            self._num_ahead -= len(held.rows.rows)
        for cache, chunks in zip(self._caches, held.chunks, strict=True):
            if not cache.wait(chunks, _WAIT_SECONDS, self._is_over):
                raise DataError("reading was ended")
        return held.rows

    def close(self) -> None:
        """See :class:`StepPlan`; fetched chunks stay in the cache."""
        self._is_over.set()
        with self._lock:
            self._release()
            while self._planned:
                self._unpin(self._planned.popleft())

    def _plan_next(self) -> bool:
        """Pin the chunks of one more step; return whether there was room."""
        if self._next is None:
            if not self._to_plan or self._num_ahead > _AHEAD_ROWS:
                return False
            rows = self._plan(self._to_plan.popleft())
            chunks = [{*np.unique(each // CHUNK_ROWS).tolist()} for each in (rows.own, rows.rows)]
            self._next = _PlannedStep(rows, chunks[: len(self._caches)])
        pairs = list(zip(self._caches, self._next.chunks, strict=True))
        if not all(cache.fits(chunks) for cache, chunks in pairs):
            if not self._planned:
                raise DataError("a step needs more rows than data.local_cache_gb has room for; raise it")
            return False
        for cache, of_cache in pairs:
            cache.pin(of_cache)
        self._planned.append(self._next)
        self._num_ahead += len(self._next.rows.rows)
        self._next = None
        return True

    def _release(self) -> None:
        if self._held is not None:
            self._unpin(self._held)
            self._held = None

    def _unpin(self, planned: _PlannedStep) -> None:
        for cache, chunks in zip(self._caches, planned.chunks, strict=True):
            cache.unpin(chunks)
