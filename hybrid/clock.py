"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("data", "lookup", "dense", "backward", "update")


class StepClock:
    """Adds up the seconds spent in each phase of a step.

    ======== ================================================================
    data     waiting for the next batch
    lookup   building and sending lookups, and waiting for their answers
    dense    the forward pass of the dense net and the loss
    backward the distributed backward pass, with the all-reduce of DDP
    update   the optimizer of the dense net
    ======== ================================================================
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a ``with`` block under ``name``, one of :data:`PHASES`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by phase."""
        seconds, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return seconds
