"""When a worker updates what it holds: the barrier between the steps of all trainers.

Synchronous::

    trainer 0   lookup(step 7) ── backward: gradients of step 7 ──┐            ┌─ lookup(step 8) answered
    trainer 1   lookup(step 7) ───── backward: gradients ─────────┤            ├─ lookup(step 8) answered
    worker                                          all are in: one update ────┘

A lookup names how many updates it must see; until then it waits as a future and holds no thread.
Gradients of a step meet in trainer order, whatever order they arrived in.

Pipelined, a trainer looks up step 8 with the gradients of step 6, so those rows lack the update of step 7.
That update waits until the lookups that it follows are answered: every lookup sees exactly the updates it
asked for, never more, and the result does not depend on who was quick.

Asynchronous, whatever trainers have handed in is applied as soon as the update before is, the steps of each
trainer in their order, even where one message overtakes another; a lookup waits only for its own trainer's
gradients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from hybrid.answer import Answer
from hybrid.clock import Flow, OpenSpan, StepClock
from hybrid.errors import ClusterError
from hybrid.hosting.attendance import Attendance
from hybrid.steps.rules import Staleness, UpdateMode, UpdateRules
from hybrid.steps.ticket import Purpose, Ticket

Contribution = TypeVar("Contribution")
Result = TypeVar("Result")

_MAX_LOOKUP_THREADS = 4


class Update(Protocol):
    """The merged gradients of one update, ready to be applied."""

    def squared_norm(self) -> float: ...

    def apply(self, scale: float) -> None: ...


@dataclass(slots=True)
class _Waiting(Generic[Result]):
    ticket: Ticket
    work: Callable[[], Result]
    future: Answer[Result]
    span: OpenSpan | None = None


@dataclass(slots=True)
class _Share(Generic[Contribution]):
    """What one trainer has handed in for one step, by part."""

    followed: bool
    arrived_at: float
    parts: dict[int, Contribution] = field(default_factory=dict)
    read_at: int = 0  # the fewest updates that any part's rows had seen


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
        self._version = 0
        self._shares: dict[tuple[int, int], _Share[Contribution]] = {}  # by step and trainer
        self._applying: list[tuple[int, int]] = []
        self._attendance = Attendance(rules.num_trainers)
        self._served: dict[tuple[int, int], int] = {}  # answered lookups by step and trainer
        self._waiting: list[_Waiting[object]] = []
        self._norm: tuple[int, float] | None = None  # of the last step that was merged
        self._norm_waiting: list[tuple[int, Answer[float]]] = []
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
        return self._version

    def when(self, ticket: Ticket, work: Callable[[], Result], flow: Flow | None = None) -> Answer[Result]:
        """Run ``work`` once as many updates are applied as the ticket asks for; at once where they are.

        In async mode the ticket's version counts the steps of its own trainer: all those must be applied, so
        that it sees its own updates and cannot run ahead of them.
        """
        waiting = _Waiting(ticket, work, Answer())
        with self._changed:
            if self._failure is not None:
                waiting.future.set_exception(self._failure)
                return waiting.future
            if not self._is_ready(ticket):
                if ticket.purpose is not Purpose.PREDICT:
                    waiting.span = self._clock.begin("wait", ticket.step, flow=flow)
                self._waiting.append(waiting)  # type: ignore[arg-type]  # results are opaque here
                return waiting.future
        self._answer(waiting)
        return waiting.future

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
        trainer, step = ticket.trainer, ticket.step
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if not self._attendance.takes_part(trainer, step):
                raise ClusterError(f"trainer {trainer} sent gradients of step {step} after its end")
            share = self._shares.get((step, trainer))
            is_past = self._attendance.is_applied(trainer, step) or (step, trainer) in self._applying
            if is_past or (share and ticket.part in share.parts):
                raise ClusterError(f"trainer {trainer} sent gradients of step {step} twice")
            if share is None:
                share = _Share(ticket.followed, time.monotonic(), read_at=read_at)
                self._shares[step, trainer] = share
            share.parts[ticket.part] = contribution
            share.read_at = min(share.read_at, read_at)
            taken = self._take() if updates_here and not self._rules.decided else None
            if taken is None:
                self._changed.notify_all()
        if taken is not None:
            self._make(*taken)

    def norm(self, step: int) -> Answer[float]:
        """The squared norm of a step's merged gradients, once all of them are in."""
        future: Answer[float] = Answer()
        with self._changed:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            if self._norm is None or self._norm[0] < step:
                self._norm_waiting.append((step, future))
                return future
            assert self._norm[0] == step, "no trainer is two steps behind another"
            future.set_result(self._norm[1])
        return future

    def decide(self, step: int, scale: float | None) -> None:
        """Say by what a step's gradients are to be multiplied; None drops them."""
        with self._changed:
            self._decisions[step] = scale
            self._changed.notify_all()

    def finish(self, trainer: int, step: int) -> None:
        """Expect nothing of ``trainer`` from ``step`` on; the others need not wait for it."""
        with self._changed:
            self._attendance.finish(trainer, step)
            self._changed.notify_all()

    def rejoin(self, trainer: int, step: int) -> None:
        """Expect a trainer that had finished again, from ``step`` on; earlier ones may still be under way."""
        with self._changed:
            self._attendance.rejoin(trainer, step)

    def fail(self, reason: str) -> None:
        """Let everybody who waits here, now and later, know that the run has failed elsewhere."""
        self._fail(ClusterError(reason))

    def take_staleness(self) -> Staleness:
        """The staleness of all updates since the last call."""
        with self._changed:
            taken, self._staleness = self._staleness, Staleness()
        return taken

    def drain(self) -> None:
        """Return once all contributions so far are applied.

        Raises:
            ClusterError: a trainer is missing (see ``timeout_seconds``), or the barrier was closed.
        """
        with self._changed:
            # Twice, so that what the barrier waits for fails first and says what it was.
            self._changed.wait_for(
                lambda: self._failure or not (self._shares or self._applying), 2 * self._rules.timeout_seconds
            )
            if self._failure is not None:
                raise self._failure
            if self._shares or self._applying:
                raise ClusterError("gradients are still waiting for their update")

    def restart(self, version: int) -> None:
        """Count on from ``version`` updates, as after loading a checkpoint; nothing may be under way."""
        with self._changed:
            assert not self._shares
            assert not self._applying
            assert not self._waiting
            self._version = version
            self._attendance.restart(version)
            self._served.clear()
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
                while (taken := self._next()) is not None:
                    self._make(*taken)
                self._fail(ClusterError("the worker is stopping"))
            except Exception as error:  # handed on to every caller, now and later
                self._fail(error)

    def _make(self, step: int, shares: list[_Share[Contribution]]) -> None:
        try:
            self._update(step, shares)
        except Exception as error:  # handed on to every caller, now and later
            self._fail(error)
            return
        self._release()

    def _update(self, step: int, shares: list[_Share[Contribution]]) -> None:
        contributions = [share.parts[part] for share in shares for part in sorted(share.parts)]
        with self._clock.span("merge", step):
            update = self._merge(step, contributions)
        scale = self._decision(step, update) if self._rules.decided else 1.0
        if scale is not None:
            with self._clock.span("apply", step):
                update.apply(scale)
        ages = [self._version - share.read_at for share in shares]
        with self._changed:
            self._staleness += Staleness(len(ages), sum(ages), max(ages))

    def _decision(self, step: int, update: Update) -> float | None:
        """Make a step's norm known, and wait for what the trainers make of it."""
        norm = update.squared_norm()
        with self._changed:
            self._norm = (step, norm)
            answered = [future for of_step, future in self._norm_waiting if of_step == step]
            self._norm_waiting = [(s, future) for s, future in self._norm_waiting if s != step]
        for future in answered:
            future.set_result(norm)
        with self._changed:
            is_decided = self._changed.wait_for(
                lambda: step in self._decisions or self._failure or self._closed, self._rules.timeout_seconds
            )
            if self._failure is not None:
                raise self._failure
            if not is_decided or self._closed:
                raise ClusterError(f"step {step}: no decision of trainer 0 (cluster.step_timeout_seconds)")
            return self._decisions.pop(step)

    def _next(self) -> tuple[int, list[_Share[Contribution]]] | None:
        """Wait for the contributions of the next update; None once closed."""
        with self._changed:
            while not self._closed:
                if self._failure is not None:
                    raise self._failure
                if taken := self._take():
                    return taken
                self._changed.wait(self._seconds_left())
            # An update that another thread makes still needs the readers.
            self._changed.wait_for(lambda: self._failure or not self._applying, self._rules.timeout_seconds)
        return None

    def _take(self) -> tuple[int, list[_Share[Contribution]]] | None:
        """Step and contributions of the next update, now to be made, if it lacks none and is the only one."""
        if self._applying or not (keys := self._complete()):
            return None
        self._applying = keys
        return keys[0][0], [self._shares.pop(key) for key in keys]

    def _complete(self) -> list[tuple[int, int]]:
        """Step and trainer of every share of the next update; none where it lacks something."""
        if self._rules.mode is UpdateMode.ASYNC:
            return [key for trainer in range(self._rules.num_trainers) for key in self._whole_of(trainer)]
        trainers = self._attendance.at(self._version)
        if not all(self._is_whole(self._version, trainer) for trainer in trainers):
            return []
        return [(self._version, trainer) for trainer in trainers]

    def _whole_of(self, trainer: int) -> Iterator[tuple[int, int]]:
        """Step and trainer of each share of one trainer that can be applied, with those before it."""
        step = self._attendance.next_step(trainer)
        while self._is_whole(step, trainer):
            yield step, trainer
            step += 1

    def _is_whole(self, step: int, trainer: int) -> bool:
        """Whether all of a share is in, and the lookups are answered that must not see its update."""
        share = self._shares.get((step, trainer))
        if share is None or len(share.parts) < self._rules.parts:
            return False
        return not share.followed or self._served.get((step + 1, trainer), 0) >= self._rules.parts

    def _is_ready(self, ticket: Ticket) -> bool:
        if self._rules.mode is not UpdateMode.ASYNC:
            return ticket.version <= self._version
        return ticket.version <= self._attendance.next_step(ticket.trainer)

    def _seconds_left(self) -> float | None:
        """How long the step under way may still wait for its last trainer; None where no step is."""
        if self._rules.mode is UpdateMode.ASYNC:
            return None
        step = self._version
        expected = self._attendance.at(step)
        arrived = [s.arrived_at for t in expected if (s := self._shares.get((step, t)))]
        if not arrived:
            return None
        timeout = self._rules.timeout_seconds
        left = min(arrived) + timeout - time.monotonic()
        if left <= 0:
            missing = [t for t in expected if not self._is_whole(step, t)]
            raise ClusterError(
                f"step {step}: no gradients from {', '.join(f'trainer {t}' for t in missing)} "
                f"for {timeout:g} s (cluster.step_timeout_seconds)"
            )
        return left

    def _release(self) -> None:
        with self._changed:
            for step, trainer in self._applying:
                self._served.pop((step, trainer), None)
                self._attendance.apply(trainer, step)
            self._version += 1
            self._applying = []
            self._changed.notify_all()
            ready = [w for w in self._waiting if self._is_ready(w.ticket)]
            self._waiting = [w for w in self._waiting if not self._is_ready(w.ticket)]
        for waiting in ready:
            if waiting.span is not None:
                waiting.span.close()
            self._readers.submit(self._answer, waiting)

    def _answer(self, waiting: _Waiting[Result]) -> None:
        try:
            waiting.future.set_result(waiting.work())
        except Exception as error:  # handed on to whoever waits
            waiting.future.set_exception(error)
            return
        ticket = waiting.ticket
        if ticket.purpose is Purpose.PREFETCH:
            with self._changed:
                key = (ticket.step, ticket.trainer)
                self._served[key] = self._served.get(key, 0) + 1
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, []
            norm_waiting, self._norm_waiting = self._norm_waiting, []
        failed: list[Answer[Any]] = [*(w.future for w in waiting), *(future for _, future in norm_waiting)]
        for future in failed:
            future.set_exception(error)
