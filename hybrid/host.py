"""What a worker hosts, tables or a dense net: the calls that reach its update barrier."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.futures import Future

from hybrid.barrier import UpdateBarrier
from hybrid.update import Staleness


class Host(nn.Module):
    """Base of what the master creates on a worker as a ``RemoteModule``.

    Attributes:
        barrier: between the steps of all trainers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.barrier: UpdateBarrier[Any]

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

    def close(self) -> None:
        """End the background thread."""
        self.barrier.close()
