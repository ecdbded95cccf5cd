"""The update barrier of a worker between the steps of all trainers.

In ``sync`` mode::

    trainer 0   lookup(step 7) ── backward: gradients of step 7 ──┐            ┌─ lookup(step 8) runs
    trainer 1   lookup(step 7) ───── backward: gradients ─────────┤            ├─ lookup(step 8) runs
    worker                                          all arrived: one update ────┘

A lookup states how many updates it must see. Until these are applied, the lookup waits as a future, without
a thread. In ``lookahead`` mode, lookups arrive earlier. The ``ledger`` decides what an update waits for.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch.futures import Future

from hybrid.errors import ClusterError, DataError
from hybrid.primitives.step_timings import OpenSpan, StepClock
from hybrid.primitives.thread_counts import use_configured_threads
from hybrid.updates.ledger import Contribution, Ledger
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateRules

Result = TypeVar("Result")

_MAX_LOOKUP_THREADS = 4


class Update(Protocol):
    """Merged gradients that are applied together. An error of a method makes the barrier fail."""

    def squared_norm(self) -> float:
        """Return the squared norm of all gradients."""

    def apply(self, scale: float) -> None:
        """Apply the gradients times ``scale``."""


class _QueuedLookup(NamedTuple):
    ticket: Ticket
    work: Callable[[], object]
    future: Future[Any]
    is_large: bool
    span: OpenSpan | None = None


class UpdateBarrier(Generic[Contribution]):
    """The barrier that collects contributions of all trainers, applies them as one update, and runs lookups.

    A contribution is what a trainer sends for one lookup: gradients of rows, or of a dense net.

    Args:
        merge: returns the update of a step from the contributions, sorted by trainer, step and lookup. The
            same thread then applies the update, or drops it if the trainers decide so.
        clock: records the time of pending lookups and of updates.
        prepare_step: prepares the update of a step, given the number of the step. The barrier calls this
            after the previous update and the lookups that waited for the previous update.
    """

    def __init__(
        self,
        rules: UpdateRules,
        merge: Callable[[int, list[Contribution]], Update],
        clock: StepClock | None = None,
        prepare_step: Callable[[int], object] | None = None,
    ) -> None:
        self._prepare_step = prepare_step
        self._clock = clock or StepClock()
        self._rules = rules
        self._merge = merge
        self._ledger = Ledger[Contribution](rules)
        self._waiting: list[_QueuedLookup] = []
        self._norms: dict[int, float] = {}  # squared norm of the last merged step
        self._norm_step = -1  # the last step whose norm was requested
        self._norm_waiting: dict[int, list[Future[Any]]] = {}  # by step
        self._decisions: dict[int, float | None] = {}  # factor of the gradients by step, None to drop them
        self._failure: Exception | None = None  # raised in every call from then on
        self._closed = False
        self._changed = threading.Condition()
        num_threads = min(rules.num_trainers, _MAX_LOOKUP_THREADS)
        self._lookup_pool = ThreadPoolExecutor(num_threads, "lookup", use_configured_threads)
        self._updater = threading.Thread(target=self._run, name="updater", daemon=True)
        self._updater.start()

    def run_when_ready(
        self, ticket: Ticket, work: Callable[[], Result], *, is_large: bool = False
    ) -> Future[Result]:
        """Return a future of ``work``, which runs once the updates that the ticket requires are applied.

        If these updates are applied already, this call runs ``work``. Otherwise, ``work`` waits. A prefetch
        then replaces a waiting prefetch with the same ``ticket.key``, and the future of the replaced prefetch
        fails with ClusterError. If the barrier has failed, the future fails with the barrier's error.

        Args:
            is_large: whether ``work`` takes longer than waking a thread, so that another thread may run it.
        """
        future: Future[Any] = Future()
        lookup = _QueuedLookup(ticket, work, future, is_large)
        replaced: list[_QueuedLookup] = []
        with self._changed:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            is_ready = self._ledger.is_ready(ticket)
            if not is_ready:
                if ticket.purpose is Purpose.PREFETCH:
                    key = ticket.key
                    replaced = [each for each in self._waiting if each.ticket.key == key]
                is_timed = ticket.purpose is not Purpose.PREDICT
                span = self._clock.begin("wait", ticket.step) if is_timed else None
                self._waiting = [each for each in self._waiting if each not in replaced]
                self._waiting.append(lookup._replace(span=span))
        for each in replaced:
            each.future.set_exception(ClusterError(f"step {ticket.step}: a new lookup replaces this one"))
        if is_ready:
            self._run_lookup(lookup)
        return future

    def contribute(
        self, ticket: Ticket, contribution: Contribution, *, should_update_here: bool = False
    ) -> None:
        """Add a trainer's gradients of one lookup.

        Args:
            should_update_here: whether the calling thread applies an update that these gradients complete.
                For a small update, this is faster than waking the updater thread. The updater thread always
                applies updates that wait for a decision of the trainers.

        Raises:
            ClusterError: the trainer has already sent these gradients.
            DataError: two trainers have read different global batches in a step. The barrier then fails.
            Exception: the error with which the barrier has failed.
        """
        try:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                self._ledger.enter(ticket, contribution, time.monotonic())
                is_here = should_update_here and not self._rules.has_update_guard
                update = self._ledger.begin_update() if is_here else None
                if update is None:
                    self._changed.notify_all()
        except DataError as error:
            self._fail(error)
            raise
        if update is not None:
            self._run_update(*update)

    def squared_norm(self, step: int) -> Future[float]:
        """Return a future of the squared norm of a step's gradients, if ``UpdateRules.has_update_guard``."""
        future: Future[Any] = Future()
        with self._changed:
            self._norm_step = max(self._norm_step, step)
            self._changed.notify_all()
            if self._failure is not None:
                future.set_exception(self._failure)
            elif step in self._norms:
                future.set_result(self._norms[step])
            else:
                self._norm_waiting.setdefault(step, []).append(future)
        return future

    def set_scale(self, step: int, scale: float | None) -> None:
        """Set the factor with which a step's gradients are applied; None drops them."""
        with self._changed:
            self._decisions[step] = scale
            self._changed.notify_all()

    def set_num_lookups(self, trainer: int, step: int, number: int) -> None:
        """Set the number of a trainer's lookups with gradients in a step; one per micro-batch by default.

        Gradients for this number of lookups complete the step, so set a new number before they have arrived.
        """
        with self._changed:
            self._ledger.set_num_lookups(trainer, step, number)

    def fail(self, reason: str) -> None:
        """Fail all pending and later lookups and contributions, because another role has failed."""
        self._fail(ClusterError(reason))

    def drain(self) -> None:
        """Wait until all contributions so far are applied or dropped.

        Raises:
            ClusterError: gradients are missing after ``cluster.timeout_seconds``, or the barrier was closed.
            Exception: the error with which the barrier has failed.
        """
        with self._changed:
            # Twice the timeout: the barrier's own wait fails first, and its error has the reason.
            if not self._wait_until(lambda: self._ledger.is_idle, timeouts=2):
                raise ClusterError("gradients are not applied yet (cluster.timeout_seconds)")

    def restart(self, version: int) -> None:
        """Continue from a loaded checkpoint after ``version`` updates; lookups that still wait fail.

        Call :meth:`drain` first.
        """
        with self._changed:
            assert self._ledger.is_idle
            self._ledger = Ledger(self._rules, version)
            self._norms = {}
            self._norm_step = -1
            waiting = self._waiting
            self._waiting = []
        for each in waiting:
            each.future.set_exception(ClusterError(f"step {each.ticket.step}: a checkpoint was loaded"))

    def close(self) -> None:
        """End the threads; pending lookups fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._updater:  # a garbage collection there may call this
            self._updater.join(self._rules.timeout_seconds)

    def _run(self) -> None:
        use_configured_threads()
        # Leaving the context waits for all lookups that updates have released, and ends their threads.
        with self._lookup_pool:
            try:
                while True:
                    self._run_update(*self._wait_for_update())
            except Exception as error:
                self._fail(error)

    def _run_update(self, step: int, contributions: list[Contribution]) -> None:
        """Apply or drop an update, then run the lookups that waited for it, large ones in other threads."""
        try:
            with self._clock.span("merge", step):
                update = self._merge(step, contributions)
            scale = self._wait_for_scale(step, update) if self._rules.has_update_guard else 1.0
            if scale is not None:
                with self._clock.span("apply", step):
                    update.apply(scale)
            with self._changed:
                self._ledger.end_update()
                self._changed.notify_all()
                ready = [each for each in self._waiting if self._ledger.is_ready(each.ticket)]
                self._waiting = [each for each in self._waiting if each not in ready]
                # Under the lock: once no update is running, the updater may end the threads of lookups.
                large = [each for each in ready[1:] if each.is_large]
                others = [self._lookup_pool.submit(self._run_lookup, each) for each in large]
            for number, lookup in enumerate(ready):
                if number == 0 or not lookup.is_large:
                    self._run_lookup(lookup)
            if self._prepare_step is not None:
                wait(others, self._rules.timeout_seconds)
                self._prepare_step(step + 1)
        except Exception as error:
            self._fail(error)

    def _wait_for_scale(self, step: int, update: Update) -> float | None:
        """Send the squared norm to the trainers; return their factor for the gradients, None to drop them."""
        norm = update.squared_norm()
        with self._changed:
            self._norms = {step: norm}
            futures = self._norm_waiting.pop(step, [])
        for future in futures:
            future.set_result(norm)
        with self._changed:
            # The timeout starts when a trainer requests the norm.
            self._wait_until(lambda: self._norm_step >= step or step in self._decisions or self._closed, None)
            is_decided = self._wait_until(lambda: step in self._decisions or self._closed)
            if not is_decided or self._closed:
                raise ClusterError(f"step {step}: no decision from trainer 0 (cluster.timeout_seconds)")
            return self._decisions.pop(step)

    def _wait_for_update(self) -> tuple[int, list[Contribution]]:
        """Wait for the next update's contributions, and begin it; raise an error after a failure or close."""
        with self._changed:
            while not (self._closed or self._failure):
                update = self._ledger.begin_update()
                if update:
                    return update
                self._changed.wait(self._ledger.seconds_left(time.monotonic()))
            # Another thread may apply an update, which still needs the threads of lookups.
            self._wait_until(lambda: not self._ledger.is_updating)
            raise ClusterError("the worker is stopping")

    def _wait_until(self, condition: Callable[[], bool], timeouts: int | None = 1) -> bool:
        """Wait for a condition, and return whether it holds. Raise the error of a barrier that has failed.

        Wait for at most ``timeouts`` times ``cluster.timeout_seconds``; without a limit if it is None.
        """
        seconds = None if timeouts is None else timeouts * self._rules.timeout_seconds
        is_over = self._changed.wait_for(lambda: self._failure or condition(), seconds)
        if self._failure is not None:
            raise self._failure
        return bool(is_over)

    def _run_lookup(self, lookup: _QueuedLookup) -> None:
        if lookup.span is not None:
            lookup.span.close()
        try:
            lookup.future.set_result(lookup.work())
        except Exception as error:  # raised where the future is awaited
            lookup.future.set_exception(error)

    def _fail(self, error: Exception) -> None:
        """Let all pending and later calls fail with ``error``, unless the barrier has already failed."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
            waiting = self._waiting
            self._waiting = []
            norm_waiting = self._norm_waiting
            self._norm_waiting = {}
        for future in chain((w.future for w in waiting), *norm_waiting.values()):
            future.set_exception(error)
