"""When a worker updates what it holds: the barrier between the steps of all trainers.

Synchronous::

    trainer 0   lookup(step 7) ── backward: gradients of step 7 ──┐            ┌─ lookup(step 8) answered
    trainer 1   lookup(step 7) ───── backward: gradients ─────────┤            ├─ lookup(step 8) answered
    worker                                          all are in: one update ────┘

A lookup names how many updates it must see; until then it waits as a future and holds no thread. What an
update waits for, in this mode and the others, the ``ledger`` says.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from hybrid.errors import ClusterError
from hybrid.primitives.deferred_response import DeferredResponse
from hybrid.primitives.step_timings import Flow, OpenSpan, StepClock
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import Staleness, UpdateRules
from hybrid.server.ledger import Contribution, Ledger

Result = TypeVar("Result")

_MAX_LOOKUP_THREADS = 4


class Update(Protocol):
    """The merged gradients of one update, ready to be applied."""

    def squared_norm(self) -> float: ...

    def apply(self, scale: float) -> None: ...


class _Waiting(NamedTuple):
    ticket: Ticket
    work: Callable[[], object]
    future: DeferredResponse[Any]
    span: OpenSpan | None


class UpdateBarrier(Generic[Contribution]):
    """Gathers the contributions of all trainers to a step, applies them as one update, answers lookups.

    Args:
        rules: who contributes, and when a step is complete.
        merge: called with a step and its contributions, in order of trainers and parts; what it returns is
            applied in the same thread, or dropped where the trainers decide so.
        clock: records lookups that wait, and updates, where it records.
    """

    def __init__(
        self,
        rules: UpdateRules,
        merge: Callable[[int, list[Contribution]], Update],
        clock: StepClock | None = None,
    ) -> None:
        self._clock = clock or StepClock()
        self._rules = rules
        self._merge = merge
        self._ledger = Ledger[Contribution](rules)
        self._waiting: list[_Waiting] = []
        self._norm: tuple[int, float] | None = None  # of the last step that was merged
        self._norm_waiting: dict[int, list[DeferredResponse[float]]] = {}  # by step
        self._decisions: dict[int, float | None] = {}
        self._staleness = Staleness()
        self._failure: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._readers = ThreadPoolExecutor(min(rules.num_trainers, _MAX_LOOKUP_THREADS), "lookup")
        self._updater = threading.Thread(target=self._run, name="updater", daemon=True)
        self._updater.start()

    @property
    def version(self) -> int:
        """How many updates have been applied; a skipped step counts as one."""
        return self._ledger.version

    def when(
        self, ticket: Ticket, work: Callable[[], Result], flow: Flow | None = None
    ) -> DeferredResponse[Result]:
        """Run ``work`` once as many updates are applied as the ticket asks for; at once where they are."""
        future: DeferredResponse[Result] = DeferredResponse()
        with self._changed:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            if not self._ledger.is_ready(ticket):
                is_timed = ticket.purpose is not Purpose.PREDICT
                span = self._clock.begin("wait", ticket.step, flow=flow) if is_timed else None
                self._waiting.append(_Waiting(ticket, work, future, span))
                return future
        self._answer(ticket, work, future)
        return future

    def contribute(
        self, ticket: Ticket, contribution: Contribution, read_at: int, *, updates_here: bool = False
    ) -> None:
        """Hand in a trainer's gradients of a step. The update follows in the background.

        Args:
            read_at: how many updates the rows had seen that the gradients were computed with.
            updates_here: where these gradients complete an update, make it in this thread. To wake another
                for that costs more than a small update, and the caller has to wait for it anyway.

        Raises:
            ClusterError: the barrier has failed, or the trainer has sent this part of the step, or its
                end, already.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._ledger.enter(ticket, contribution, read_at, time.monotonic())
            taken = self._ledger.begin_update() if updates_here and not self._rules.decided else None
            if taken is None:
                self._changed.notify_all()
        if taken is not None:
            self._make(*taken)

    def norm(self, step: int) -> DeferredResponse[float]:
        """The squared norm of a step's merged gradients, once all of them are in."""
        future: DeferredResponse[float] = DeferredResponse()
        with self._changed:
            if self._failure is not None:
                future.set_exception(self._failure)
            elif self._norm is None or self._norm[0] < step:
                self._norm_waiting.setdefault(step, []).append(future)
            else:
                assert self._norm[0] == step, "no trainer is two steps behind another"
                future.set_result(self._norm[1])
        return future

    def decide(self, step: int, scale: float | None) -> None:
        """Say by what a step's gradients are to be multiplied; None drops them."""
        with self._changed:
            self._decisions[step] = scale
            self._changed.notify_all()

    def expect(self, trainer: int, step: int, parts: int) -> None:
        """Await so many parts of a trainer's gradients of a step, of which none may have come yet."""
        with self._changed:
            self._ledger.expect(trainer, step, parts)

    def finish(self, trainer: int, step: int) -> None:
        """Expect nothing of ``trainer`` from ``step`` on; the others need not wait for it."""
        with self._changed:
            self._ledger.finish(trainer, step)
            self._changed.notify_all()

    def rejoin(self, trainer: int, step: int) -> None:
        """Expect a trainer that had finished again, from ``step`` on; earlier ones may still be under way."""
        with self._changed:
            self._ledger.rejoin(trainer, step)

    def fail(self, reason: str) -> None:
        """Let everybody who waits here, now and later, know that the run has failed elsewhere."""
        self._fail(ClusterError(reason))

    def take_staleness(self, version: int = 0) -> Staleness:
        """The staleness of all updates since the last call, once there are ``version`` of them in all.

        Raises:
            ClusterError: they do not come; see :meth:`drain`.
        """
        with self._changed:
            if not self._await(lambda: self._ledger.version >= version, timeouts=2):
                raise ClusterError(f"step {version}: updates before it are missing")
            taken, self._staleness = self._staleness, Staleness()
        return taken

    def drain(self) -> None:
        """Return once all contributions so far are applied.

        Raises:
            ClusterError: a trainer is missing (see ``timeout_seconds``), or the barrier was closed.
        """
        with self._changed:
            # Twice, so that what the barrier waits for fails first and says what it was.
            if not self._await(lambda: self._ledger.is_settled, timeouts=2):
                raise ClusterError("gradients are still waiting for their update")

    def restart(self, version: int) -> None:
        """Count on from ``version`` updates, as after loading a checkpoint; nothing may be under way."""
        with self._changed:
            assert not self._waiting
            assert self._ledger.is_settled
            self._ledger = Ledger(self._rules, version)
            self._norm = None

    def close(self) -> None:
        """End the threads; lookups still waiting fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._updater.join(self._rules.timeout_seconds)

    def _run(self) -> None:
        # The updater ends the readers: each lookup that an update releases is answered before they end.
        with self._readers:
            try:
                while True:
                    self._make(*self._next())
            except Exception as error:  # handed on to every caller, now and later
                self._fail(error)

    def _make(self, step: int, contributions: list[Contribution]) -> None:
        """Make an update; the readers answer the lookups that waited for it."""
        try:
            with self._clock.span("merge", step):
                update = self._merge(step, contributions)
            scale = self._decision(step, update) if self._rules.decided else 1.0
            if scale is not None:
                with self._clock.span("apply", step):
                    update.apply(scale)
        except Exception as error:  # handed on to every caller, now and later
            self._fail(error)
            return
        with self._changed:
            self._staleness += self._ledger.end_update()
            self._changed.notify_all()
            ready = [w for w in self._waiting if self._ledger.is_ready(w.ticket)]
            self._waiting = [w for w in self._waiting if not self._ledger.is_ready(w.ticket)]
            # Under the lock: once no update is under way, the updater may shut the readers down.
            for waiting in ready:
                if waiting.span is not None:
                    waiting.span.close()
                self._readers.submit(self._answer, waiting.ticket, waiting.work, waiting.future)

    def _decision(self, step: int, update: Update) -> float | None:
        """Make a step's norm known, and wait for what the trainers make of it."""
        norm = update.squared_norm()
        with self._changed:
            self._norm = (step, norm)
            answered = self._norm_waiting.pop(step, [])
        for future in answered:
            future.set_result(norm)
        with self._changed:
            is_decided = self._await(lambda: step in self._decisions or self._closed)
            if not is_decided or self._closed:
                raise ClusterError(f"step {step}: no decision of trainer 0 (cluster.timeout_seconds)")
            return self._decisions.pop(step)

    def _next(self) -> tuple[int, list[Contribution]]:
        """Wait for the contributions of the next update; ClusterError once closed."""
        with self._changed:
            while not (self._closed or self._failure):
                if taken := self._ledger.begin_update():
                    return taken
                self._changed.wait(self._ledger.seconds_left(time.monotonic()))
            # An update that another thread makes still needs the readers.
            self._await(lambda: not self._ledger.is_updating)
            raise ClusterError("the worker is stopping")

    def _await(self, is_so: Callable[[], bool], timeouts: int = 1) -> bool:
        """Let others in until something is so, or time is up: whether it is. Raises what has failed."""
        seconds = timeouts * self._rules.timeout_seconds
        is_over = self._changed.wait_for(lambda: self._failure or is_so(), seconds)
        if self._failure is not None:
            raise self._failure
        return bool(is_over)

    def _answer(self, ticket: Ticket, work: Callable[[], Result], future: DeferredResponse[Result]) -> None:
        try:
            future.set_result(work())
        except Exception as error:  # handed on to whoever waits
            future.set_exception(error)
            return
        if ticket.purpose is Purpose.PREFETCH:
            with self._changed:
                self._ledger.serve(ticket)
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, []
            norm_waiting, self._norm_waiting = self._norm_waiting, {}
        for future in chain((w.future for w in waiting), *norm_waiting.values()):
            future.set_exception(error)
