"""When a worker updates its tables: the barrier between the steps of all trainers.

Synchronous::

    trainer 0   lookup(step 7) ── backward: gradients of step 7 ──┐            ┌─ lookup(step 8) answered
    trainer 1   lookup(step 7) ───── backward: gradients ─────────┤            ├─ lookup(step 8) answered
    worker                                          all are in: one update ────┘

A lookup names how many updates it must see; until then it waits as a future and holds no thread.
Gradients of a step meet in trainer order, whatever order they arrived in. Asynchronous mode applies
whatever has come; a lookup waits only for its own trainer's gradients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from torch.futures import Future

from hybrid.errors import ClusterError

Contribution = TypeVar("Contribution")
Result = TypeVar("Result")

_MAX_LOOKUP_THREADS = 4


class UpdateMode(StrEnum):
    """How the trainers' gradients become updates of the tables."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(slots=True)
class _Waiting(Generic[Result]):
    version: int
    trainer: int
    work: Callable[[], Result]
    future: Future[Result]

    def run(self) -> None:
        try:
            self.future.set_result(self.work())
        except Exception as error:  # handed on to whoever waits
            self.future.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong


class UpdateBarrier(Generic[Contribution]):
    """Gathers one contribution of each trainer a step, applies them as one update, answers lookups.

    Args:
        num_trainers: how many contributions make a synchronous step.
        apply: called with the contributions of one update, in trainer order, in the updater thread.
        timeout_seconds: how long a step may wait for its last trainer.
    """

    def __init__(
        self,
        num_trainers: int,
        apply: Callable[[list[Contribution]], None],
        timeout_seconds: float,
        mode: UpdateMode = UpdateMode.SYNC,
    ) -> None:
        self._num_trainers = num_trainers
        self._apply = apply
        self._timeout_seconds = timeout_seconds
        self._mode = mode
        self._version = 0
        self._pending: dict[int, dict[int, Contribution]] = {}
        self._arrived_at: dict[int, float] = {}
        self._waiting: list[_Waiting[object]] = []
        self._failure: Exception | None = None
        self._applying: frozenset[int] = frozenset()  # trainers whose gradients are being applied
        self._closed = False
        self._changed = threading.Condition()
        self._updater = threading.Thread(target=self._run, name="updater", daemon=True)
        self._updater.start()

    @property
    def version(self) -> int:
        """How many updates have been applied."""
        return self._version

    def when(self, version: int, work: Callable[[], Result], trainer: int = 0) -> Future[Result]:
        """Run ``work`` once ``version`` updates are applied; at once where they are.

        In async mode, where versions mean nothing, run it once all gradients that ``trainer`` handed in
        are applied: a trainer sees its own updates, and cannot run ahead of them.
        """
        future: Future[Result] = Future()
        waiting = _Waiting(version, trainer, work, future)
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if not self._is_ready(waiting):
                self._waiting.append(waiting)  # type: ignore[arg-type]  # results are opaque here
                return future
        waiting.run()
        return future

    def contribute(self, trainer: int, step: int, contribution: Contribution) -> None:
        """Hand in a trainer's gradients of a step. Returns at once; the update follows in the background.

        Raises:
            ClusterError: the barrier has failed, or the step was updated or contributed to already.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            arrived = self._pending.setdefault(step, {})
            if trainer in arrived or (self._mode is UpdateMode.SYNC and step < self._version):
                raise ClusterError(f"trainer {trainer} sent gradients of step {step} twice")
            arrived[trainer] = contribution
            self._arrived_at.setdefault(step, time.monotonic())
            self._changed.notify_all()

    def drain(self) -> None:
        """Return once all contributions so far are applied; the caller's call has a timeout of its own.

        Raises:
            ClusterError: a trainer is missing (see ``timeout_seconds``), or the barrier was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not (self._pending or self._applying))
            if self._failure is not None:
                raise self._failure

    def restart(self, version: int) -> None:
        """Count on from ``version`` updates, as after loading a checkpoint; nothing may be under way."""
        with self._changed:
            assert not self._pending
            assert not self._applying
            assert not self._waiting
            self._version = version

    def close(self) -> None:
        """End the threads; lookups still waiting fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._updater.join(self._timeout_seconds)

    def _run(self) -> None:
        # The updater owns the readers: each lookup that it releases is answered before they end.
        with ThreadPoolExecutor(min(self._num_trainers, _MAX_LOOKUP_THREADS), "lookup") as readers:
            try:
                while (contributions := self._next()) is not None:
                    self._apply(contributions)
                    self._release(readers)
                self._fail(ClusterError("the worker is stopping"))
            except Exception as error:  # handed on to every caller, now and later
                self._fail(error)

    def _next(self) -> list[Contribution] | None:
        """Wait for the contributions of the next update; None once closed."""
        with self._changed:
            while not self._closed:
                taken = self._take()
                if taken is not None:
                    self._applying = frozenset(taken)
                    return [taken[trainer] for trainer in sorted(taken)]
                self._changed.wait(self._seconds_left())
        return None

    def _take(self) -> dict[int, Contribution] | None:
        if self._mode is UpdateMode.ASYNC:
            step = next(iter(self._pending), None)
        else:
            step = self._version if len(self._pending.get(self._version, ())) == self._num_trainers else None
        if step is None:
            return None
        del self._arrived_at[step]
        return self._pending.pop(step)

    def _is_ready(self, waiting: _Waiting[Result]) -> bool:
        if self._mode is UpdateMode.SYNC:
            return waiting.version <= self._version
        unapplied = (self._applying, *self._pending.values())
        return not any(waiting.trainer in trainers for trainers in unapplied)

    def _seconds_left(self) -> float | None:
        """How long the step under way may still wait for its last trainer; None where no step is."""
        arrived = self._pending.get(self._version)
        if self._mode is UpdateMode.ASYNC or not arrived:
            return None
        waited = time.monotonic() - self._arrived_at[self._version]
        if waited >= self._timeout_seconds:
            missing = ", ".join(f"trainer {t}" for t in range(self._num_trainers) if t not in arrived)
            raise ClusterError(
                f"step {self._version}: no gradients from {missing} for {self._timeout_seconds:g} s "
                "(cluster.step_timeout_seconds)"
            )
        return self._timeout_seconds - waited

    def _release(self, readers: ThreadPoolExecutor) -> None:
        with self._changed:
            self._version += 1
            self._applying = frozenset()
            self._changed.notify_all()
            ready = [w for w in self._waiting if self._is_ready(w)]
            self._waiting = [w for w in self._waiting if not self._is_ready(w)]
        for waiting in ready:
            readers.submit(waiting.run)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.future.set_exception(error)
