"""What trainers have handed in, and which update is next: the rules of the barrier, without its threads.

A step's gradients meet in trainer order, whatever order they arrived in, and are one update.

Pipelined, a trainer looks up step 8 with the gradients of step 6, so those rows lack the update of step 7.
That update waits until the lookups that it follows are answered: every lookup sees exactly the updates it
asked for, never more, and the result does not depend on who was quick.

Asynchronous, whatever trainers have handed in is applied as soon as the update before is, the steps of each
trainer in their order, even where one message overtakes another; a lookup waits only for its own trainer's
gradients: it sees all those updates, and cannot run ahead of them.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import Generic, TypeVar

from hybrid.errors import ClusterError
from hybrid.protocol.ticket import Ticket
from hybrid.protocol.update_rules import Staleness, UpdateMode, UpdateRules

Contribution = TypeVar("Contribution")

_NEVER = sys.maxsize  # a step that does not come


@dataclass(slots=True)
class _Entry(Generic[Contribution]):
    """What one trainer has handed in for one step, by part."""

    followed: bool
    arrived_at: float
    read_at: int  # the fewest updates that any part's rows had seen
    parts: dict[int, Contribution] = field(default_factory=dict)


class Ledger(Generic[Contribution]):
    """What has come and is applied of the steps of all trainers. One thread at a time may use it.

    A trainer takes part in all steps, but for those from one in which it has finished to one from which it
    is back. The gradients of those in which it takes part are applied in their order.

    Attributes:
        version: how many updates are applied.
    """

    def __init__(self, rules: UpdateRules, version: int = 0) -> None:
        self.version = version
        self._rules = rules
        self._entries: dict[tuple[int, int], _Entry[Contribution]] = {}  # by step and trainer
        self._updating: dict[tuple[int, int], _Entry[Contribution]] = {}  # of the update under way
        self._parts: dict[
            tuple[int, int], int
        ] = {}  # expected of a step and trainer, where not those of the rules
        self._served: dict[tuple[int, int], int] = {}  # lookups ahead, by step and trainer
        self._after_applied = [version] * rules.num_trainers  # a step, by trainer
        self._absences: list[list[range]] = [[] for _ in range(rules.num_trainers)]

    @property
    def is_updating(self) -> bool:
        """Whether an update is under way."""
        return bool(self._updating)

    @property
    def is_settled(self) -> bool:
        """Whether all that was handed in is applied."""
        return not (self._entries or self._updating)

    def enter(self, ticket: Ticket, contribution: Contribution, read_at: int, now: float) -> None:
        """Take a trainer's gradients of a part of a step; see :meth:`UpdateBarrier.contribute`."""
        trainer, key = ticket.trainer, (ticket.step, ticket.trainer)
        if not self._takes_part(trainer, ticket.step):
            raise ClusterError(f"trainer {trainer} sent gradients of step {ticket.step} after its end")
        entry = self._entries.get(key)
        is_past = ticket.step < self._after_applied[trainer] or key in self._updating
        if is_past or (entry and ticket.part in entry.parts):
            raise ClusterError(f"trainer {trainer} sent gradients of step {ticket.step} twice")
        if entry is None:
            entry = self._entries[key] = _Entry(ticket.followed, now, read_at)
        entry.parts[ticket.part] = contribution
        entry.read_at = min(entry.read_at, read_at)

    def expect(self, trainer: int, step: int, parts: int) -> None:
        """A trainer hands in another number of parts for a step than the rules say."""
        self._parts[step, trainer] = parts

    def serve(self, ticket: Ticket) -> None:
        """A lookup ahead is answered: it has read its rows."""
        key = (ticket.step, ticket.trainer)
        self._served[key] = self._served.get(key, 0) + 1

    def is_ready(self, ticket: Ticket) -> bool:
        """Whether as many updates are applied as a lookup must see."""
        if self._rules.mode is not UpdateMode.ASYNC:
            return ticket.version <= self.version
        return ticket.version <= self._next_step(ticket.trainer)

    def begin_update(self) -> tuple[int, list[Contribution]] | None:
        """Step and contributions of the next update; None where it lacks some, or another is under way."""
        if self._updating or not (keys := self._complete()):
            return None
        self._updating = {key: self._entries.pop(key) for key in keys}
        entries = self._updating.values()
        return keys[0][0], [entry.parts[part] for entry in entries for part in sorted(entry.parts)]

    def end_update(self) -> Staleness:
        """The update under way is applied, or dropped; how stale the rows were that it is of."""
        ages = [self.version - entry.read_at for entry in self._updating.values()]
        for step, trainer in self._updating:
            self._parts.pop((step, trainer), None)
            self._served.pop((step, trainer), None)
            self._after_applied[trainer] = step + 1
        self._updating = {}
        self.version += 1
        return Staleness(len(ages), sum(ages), max(ages))

    def finish(self, trainer: int, step: int) -> None:
        """A trainer takes no part from ``step`` on."""
        self._absences[trainer].append(range(step, _NEVER))

    def rejoin(self, trainer: int, step: int) -> None:
        """A trainer that has finished, unless a restart has ended that, takes part again from ``step`` on."""
        begun = self._after_applied[trainer]
        absences = [absence for absence in self._absences[trainer] if absence.stop > begun]
        self._absences[trainer] = [range(absence.start, min(absence.stop, step)) for absence in absences]

    def seconds_left(self, now: float) -> float | None:
        """How long the present step may wait for more; None before it does. ClusterError where time is up."""
        if self._rules.mode is UpdateMode.ASYNC:
            return None
        expected, timeout = self._expected(), self._rules.timeout_seconds
        arrived = [entry.arrived_at for key in expected if (entry := self._entries.get(key))]
        if not arrived:
            return None
        left = min(arrived) + timeout - now
        if left <= 0:
            missing = ", ".join(f"trainer {t}" for step, t in expected if not self._is_whole(t, step))
            message = f"step {self.version}: no gradients from {missing} for {timeout:g} s"
            raise ClusterError(f"{message} (cluster.timeout_seconds)")
        return left

    def _expected(self) -> list[tuple[int, int]]:
        """Step and trainer of every entry that the present step is of."""
        step = self.version
        return [(step, t) for t in range(self._rules.num_trainers) if self._takes_part(t, step)]

    def _takes_part(self, trainer: int, step: int) -> bool:
        return not any(step in absence for absence in self._absences[trainer])

    def _complete(self) -> list[tuple[int, int]]:
        """Step and trainer of every entry of the next update; none where it lacks something."""
        if self._rules.mode is UpdateMode.ASYNC:
            trainers = range(self._rules.num_trainers)
            return [(step, t) for t in trainers for step in self._whole_steps(t)]
        keys = self._expected()
        return keys if all(self._is_whole(t, step) for step, t in keys) else []

    def _whole_steps(self, trainer: int) -> Iterator[int]:
        return takewhile(partial(self._is_whole, trainer), count(self._next_step(trainer)))

    def _next_step(self, trainer: int) -> int:
        """The first step that a trainer takes part in and whose gradients are not applied."""
        step = self._after_applied[trainer]
        for absence in self._absences[trainer]:
            if step in absence:
                step = absence.stop
        return step

    def _is_whole(self, trainer: int, step: int) -> bool:
        """Whether all of an entry is in, and the lookups are answered that must not see its update."""
        entry = self._entries.get((step, trainer))
        if entry is None or len(entry.parts) < self._parts.get((step, trainer), self._rules.parts):
            return False
        return not entry.followed or self._served.get((step + 1, trainer), 0) >= self._rules.parts
