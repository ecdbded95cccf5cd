"""Which steps each trainer takes part in, and which of those are behind it."""

from __future__ import annotations

import sys

_NEVER = sys.maxsize  # a step that does not come


class Attendance:
    """Of the trainers of a run, as the update barrier of one host sees it.

    A trainer takes part in all steps, but for those from one in which it has finished to one from which it
    is back. The gradients of those in which it takes part are applied in their order.
    """

    def __init__(self, num_trainers: int) -> None:
        self._num_trainers = num_trainers
        self.restart(0)

    def restart(self, step: int) -> None:
        """Every trainer takes part, and all steps before ``step`` are behind it."""
        self._after_applied = [step] * self._num_trainers
        # First, and the first in which it is back.
        self._absences: list[list[tuple[int, int]]] = [[] for _ in range(self._num_trainers)]

    def takes_part(self, trainer: int, step: int) -> bool:
        return not any(first <= step < back for first, back in self._absences[trainer])

    def at(self, step: int) -> list[int]:
        """The trainers that take part in a step."""
        return [trainer for trainer in range(self._num_trainers) if self.takes_part(trainer, step)]

    def is_applied(self, trainer: int, step: int) -> bool:
        """Whether a trainer's gradients of a step are applied, or those of a later one."""
        return step < self._after_applied[trainer]

    def next_step(self, trainer: int) -> int:
        """The first step that a trainer takes part in and whose gradients are not applied."""
        step = self._after_applied[trainer]
        for first, back in self._absences[trainer]:
            if first <= step:
                step = max(step, back)
        return step

    def apply(self, trainer: int, step: int) -> None:
        """A trainer's gradients of a step are applied."""
        self._after_applied[trainer] = step + 1

    def finish(self, trainer: int, step: int) -> None:
        """A trainer takes no part from ``step`` on."""
        self._absences[trainer].append((step, _NEVER))

    def rejoin(self, trainer: int, step: int) -> None:
        """A trainer that has finished, unless a restart has ended that, takes part again from ``step`` on."""
        begun = self._after_applied[trainer]
        current = [(first, back) for first, back in self._absences[trainer] if back > begun]
        self._absences[trainer] = [(first, min(back, step)) for first, back in current]
