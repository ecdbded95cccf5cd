"""What a worker hosts, tables or a dense net: the calls that reach its update barrier."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.futures import Future

from hybrid.barrier import UpdateBarrier
from hybrid.clock import Span, StepClock
from hybrid.update import Staleness


class Host(nn.Module):
    """Base of what the master creates on a worker as a ``RemoteModule``.

    Attributes:
        barrier: between the steps of all trainers.
        clock: records what happens here, where it is told to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.barrier: UpdateBarrier[Any]
        self.clock = StepClock()

    @property
    def version(self) -> int:
        """How many updates it has seen."""
        return self.barrier.version

    def norm(self, step: int) -> Future[float]:
        """See :meth:`UpdateBarrier.norm`."""
        return self.barrier.norm(step)

    def decide(self, step: int, scale: float | None) -> None:
        """See :meth:`UpdateBarrier.decide`."""
        self.barrier.decide(step, scale)

    def finish(self, trainer: int, step: int) -> None:
        """See :meth:`UpdateBarrier.finish`."""
        self.barrier.finish(trainer, step)

    def rejoin(self, trainer: int, step: int) -> None:
        """See :meth:`UpdateBarrier.rejoin`."""
        self.barrier.rejoin(trainer, step)

    def fail(self, reason: str) -> None:
        """See :meth:`UpdateBarrier.fail`."""
        self.barrier.fail(reason)

    def take_staleness(self) -> Staleness:
        """See :meth:`UpdateBarrier.take_staleness`."""
        return self.barrier.take_staleness()

    def record(self, steps: range) -> None:
        """See :meth:`StepClock.record`."""
        self.clock.record(steps)

    def take_spans(self) -> list[Span]:
        """See :meth:`StepClock.take_spans`; with those of updates that are under way."""
        self.barrier.drain()
        return self.clock.take_spans()

    def close(self) -> None:
        """End the background thread."""
        self.barrier.close()
