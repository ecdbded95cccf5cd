"""The rows of the steps to come: known ahead, and fetched ahead where they lie elsewhere."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hybrid.data.dataset.chunk_cache import ChunkCache
from hybrid.data.dataset.sample_order import CHUNK_ROWS, WINDOW_CHUNKS
from hybrid.errors import DataError

_AHEAD_ROWS = 2 * WINDOW_CHUNKS * CHUNK_ROWS  # of all trainers: this window's, and the next
_WAIT_SECONDS = 110.0  # less than whoever takes the batches waits for one


class StepRows(NamedTuple):
    """The rows of a step, of which those from ``start`` to ``stop`` are a trainer's share."""

    rows: npt.NDArray[np.int64]
    start: int
    stop: int

    @property
    def own(self) -> npt.NDArray[np.int64]:
        return self.rows[self.start : self.stop]


class Ahead(Protocol):
    """Says which rows a step has, once they can be read."""

    def __call__(self, step: int) -> StepRows:
        """Those of a step; steps are asked for in their order."""
        ...

    def close(self) -> None:
        """End it, from another thread too."""
        ...


class AtHand:
    """Rows that can be read at any time."""

    def __init__(self, plan: Callable[[int], StepRows]) -> None:
        self._plan = plan

    def __call__(self, step: int) -> StepRows:
        """See :class:`Ahead`."""
        return self._plan(step)

    def close(self) -> None:
        """See :class:`Ahead`."""


class _Planned(NamedTuple):
    """A step, and for each cache the chunks that it has rows of."""

    rows: StepRows
    chunks: list[set[int]]


class FetchedAhead:
    """Has the chunks of the steps to come fetched, as many as there is room for, in their order.

    What a step needs is pinned as soon as there is room for it beside all steps before it, and let go of when
    the next one is asked for: a step never waits for room that a later one takes.

    Args:
        plan: says which rows a step has.
        steps: that are going to be asked for.
        shares: where the rows of a trainer's share are read.
        wholes: where something of all rows of a step is read.
    """

    def __init__(
        self,
        plan: Callable[[int], StepRows],
        steps: range,
        shares: Sequence[ChunkCache],
        wholes: Sequence[ChunkCache],
    ) -> None:
        self._plan = plan
        self._to_plan = deque(steps)
        self._caches = [*shares, *wholes]
        self._num_shares = len(shares)
        self._next: _Planned | None = None  # there was no room for it
        self._planned: deque[_Planned] = deque()
        self._held: _Planned | None = None
        self._num_ahead = 0
        self._is_over = threading.Event()
        self._lock = shares[0].lock

    def __call__(self, step: int) -> StepRows:
        """See :class:`Ahead`.

        Raises:
            DataError: there is no room for the rows of a step, or they cannot be had.
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
        """See :class:`Ahead`; what has come stays where it is."""
        self._is_over.set()
        with self._lock:
            self._release()
            while self._planned:
                self._unpin(self._planned.popleft())

    def _plan_next(self) -> bool:
        """Pin what one more step needs, if there is room."""
        if self._next is None:
            if not self._to_plan or self._num_ahead > _AHEAD_ROWS:
                return False
            self._next = self._needs(self._plan(self._to_plan.popleft()))
        pairs = list(zip(self._caches, self._next.chunks, strict=True))
        if not all(cache.fits(chunks) for cache, chunks in pairs):
            if not self._planned:
                raise DataError("a step needs more rows than data.local_cache_gb has room for; raise it")
            return False
        for cache, chunks in pairs:
            cache.pin(chunks)
        self._planned.append(self._next)
        self._num_ahead += len(self._next.rows.rows)
        self._next = None
        return True

    def _needs(self, rows: StepRows) -> _Planned:
        own, of_all = ({*np.unique(each // CHUNK_ROWS).tolist()} for each in (rows.own, rows.rows))
        num_wholes = len(self._caches) - self._num_shares
        return _Planned(rows, [own] * self._num_shares + [of_all] * num_wholes)

    def _release(self) -> None:
        if self._held is not None:
            self._unpin(self._held)
            self._held = None

    def _unpin(self, planned: _Planned) -> None:
        for cache, chunks in zip(self._caches, planned.chunks, strict=True):
            cache.unpin(chunks)
