"""The state of the update barrier, without threads: which gradients have arrived, which update is next.

``sync`` and ``lookahead``: the gradients of a step become one update. Merging is in the order of trainers,
not of arrival. A lookup sees exactly the updates before its step, so the result does not depend on timing.

``async``: once the running update ends, all gradients that have arrived become the next update. The steps of
each trainer stay in order, even if messages arrive out of order. A lookup waits only for the gradients of its
trainer.
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import Generic, TypeVar

from hybrid.errors import ClusterError, DataError
from hybrid.updates.ticket import DIFFERENT_BATCHES, Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

Contribution = TypeVar("Contribution")


@dataclass(slots=True)
class _Entry(Generic[Contribution]):
    """The gradients of one trainer for one step, by index of the lookup, and when the last arrived."""

    arrived_at: float
    contributions: dict[int, Contribution] = field(default_factory=dict)


class Ledger(Generic[Contribution]):
    """A record of which gradients of each trainer have arrived and which are applied. Not thread-safe.

    Every trainer takes part in every step. The gradients of a trainer are applied in the order of steps.

    Attributes:
        version: number of updates applied or dropped.
    """

    def __init__(self, rules: UpdateRules, version: int = 0) -> None:
        self.version = version
        self._rules = rules
        self._entries: dict[tuple[int, int], _Entry[Contribution]] = {}  # by step and trainer
        self._updating: dict[tuple[int, int], _Entry[Contribution]] = {}  # of the running update
        # By step and trainer; rules.micro_batches by default.
        self._num_lookups: dict[tuple[int, int], int] = {}
        self._first_unapplied = [version] * rules.num_trainers  # first step not applied, by trainer
        self._checksums: dict[int, tuple[int, int]] = {}  # by step: checksum of the batch, and its sender

    @property
    def is_updating(self) -> bool:
        return bool(self._updating)

    @property
    def is_idle(self) -> bool:
        """Whether all gradients that have arrived are applied or dropped."""
        return not (self._entries or self._updating)

    def enter(self, ticket: Ticket, contribution: Contribution, now: float) -> None:
        """Add a trainer's gradients of one lookup; for errors see :meth:`UpdateBarrier.contribute`."""
        trainer = ticket.trainer
        key = (ticket.step, ticket.trainer)
        if ticket.checksum:
            checksum, other = self._checksums.setdefault(ticket.step, (ticket.checksum, trainer))
            if checksum != ticket.checksum:
                raise DataError(f"step {ticket.step}: trainers {other} and {trainer} {DIFFERENT_BATCHES}")
        entry = self._entries.get(key)
        is_past = ticket.step < self._first_unapplied[trainer] or key in self._updating
        if is_past or (entry and ticket.lookup_index in entry.contributions):
            raise ClusterError(f"trainer {trainer} sent gradients of step {ticket.step} twice")
        if entry is None:
            entry = self._entries[key] = _Entry(now)
        entry.arrived_at = now
        entry.contributions[ticket.lookup_index] = contribution

    def set_num_lookups(self, trainer: int, step: int, number: int) -> None:
        self._num_lookups[step, trainer] = number

    def is_ready(self, ticket: Ticket) -> bool:
        """Whether the updates that a lookup requires are applied."""
        if self._rules.mode is not UpdateMode.ASYNC:
            return ticket.version <= self.version
        return ticket.version <= self._first_unapplied[ticket.trainer]

    def begin_update(self) -> tuple[int, list[Contribution]] | None:
        """Begin the next update; return (step of the first contribution, all contributions).

        Return None if gradients are missing, or if an update is running.
        """
        if self._updating:
            return None
        keys = self._next_entries()
        if not keys:
            return None
        self._updating = {key: self._entries.pop(key) for key in keys}
        by_index = [entry.contributions for entry in self._updating.values()]
        return keys[0][0], [each[index] for each in by_index for index in sorted(each)]

    def end_update(self) -> None:
        for step, trainer in self._updating:
            self._num_lookups.pop((step, trainer), None)
            self._first_unapplied[trainer] = step + 1
        self._updating = {}
        self.version += 1
        all_applied = min(self._first_unapplied)
        self._checksums = {step: c for step, c in self._checksums.items() if step >= all_applied}

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the timeout for missing gradients of the next update.

        The timeout begins once one trainer has sent all its gradients for it. Return None before that,
        and always in async mode. Raise ClusterError after the timeout.
        """
        if self._rules.mode is UpdateMode.ASYNC:
            return None
        step, trainers = self.version, range(self._rules.num_trainers)
        timeout = self._rules.timeout_seconds
        arrived = [self._entries[step, t].arrived_at for t in trainers if self._is_complete(t, step)]
        if not arrived:
            return None
        left = min(arrived) + timeout - now
        if left <= 0:
            missing = ", ".join(f"trainer {t}" for t in trainers if not self._is_complete(t, step))
            message = f"step {step}: no gradients from {missing} for {timeout:g} s"
            raise ClusterError(f"{message} (cluster.timeout_seconds)")
        return left

    def _next_entries(self) -> list[tuple[int, int]]:
        """Return (step, trainer) for all gradients of the next update; empty if gradients are missing."""
        if self._rules.mode is UpdateMode.ASYNC:
            keys = []
            for trainer, first in enumerate(self._first_unapplied):
                steps = takewhile(partial(self._is_complete, trainer), count(first))
                keys += [(step, trainer) for step in steps]
            return keys
        keys = [(self.version, trainer) for trainer in range(self._rules.num_trainers)]
        return keys if all(self._is_complete(t, step) for step, t in keys) else []

    def _is_complete(self, trainer: int, step: int) -> bool:
        entry = self._entries.get((step, trainer))
        number = self._num_lookups.get((step, trainer), self._rules.micro_batches)
        return entry is not None and len(entry.contributions) >= number
