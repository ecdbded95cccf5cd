"""How a step is applied, decided for all sides alike: clipped, skipped, or as it is.

::

    trainers                                            workers
    ────────                                            ───────
    after the backward pass: norm of the dense ──────►  merge the step's gradients
      gradients; ask every worker for its own  ◄──────  answer with their norm, and hold the update
    sum over trainers and workers; all decide
      the same scale, trainer 0 sends it       ──────►  apply the update, or drop it

One round trip, and none where neither clipping nor skipping is asked for.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from hybrid.errors import NonFiniteError
from hybrid.primitives.deferred_response import Awaited
from hybrid.protocol.update_rules import UpdateRules
from hybrid.server.barrier import UpdateBarrier

# As torch.nn.utils.clip_grad_norm_ has it.
_CLIP_EPS = 1e-6
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
_REMEDY = 'lower the learning rates, look at the data, or set train.clip_norm or train.non_finite = "skip"'


class Decided(Protocol):
    """What waits for decisions about its steps: a stub of what a worker hosts, or it itself."""

    def norm(self, step: int) -> Awaited[float]:
        """See :meth:`UpdateBarrier.norm`."""
        ...

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> Awaited[Result]:
        """Start a method of its update barrier."""
        ...


class Guard:
    """One trainer's part in the decisions of a run.

    Args:
        rules: of the run; those of the hosted.
        hosted: everything on workers that waits for decisions.
        group: of all trainers.
        device: on which ``group`` reduces.
    """

    def __init__(
        self,
        rules: UpdateRules,
        hosted: Sequence[Decided],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._rules = rules
        self._hosted = hosted
        self._group = group
        self._device = device
        self._sent: list[Awaited[None]] = []

    def check_loss(self, step: int, loss: float, find: Callable[[], str]) -> None:
        """NonFiniteError where the run is to stop at a loss that is not finite.

        Args:
            find: gives what is the first that is not finite, as a part of a sentence, or nothing.
        """
        if self._rules.check_finite and not math.isfinite(loss):
            first = f": {found}" if (found := find()) else ""
            raise NonFiniteError(
                f"step {step}: the loss of trainer {self._group.rank()} is {loss}{first}; {_REMEDY}"
            )

    def decide(
        self, step: int, loss: float, squared_norm: float, find: Callable[[], str | None]
    ) -> float | None:
        """What to multiply the gradients of a step by; None to skip it. All trainers call it each step.

        Args:
            loss: this trainer's part.
            squared_norm: this trainer's part of that of all dense gradients.
            find: gives a parameter whose gradient is not finite, if there is one.
        """
        if not self._rules.decided:
            if not math.isfinite(squared_norm):
                name = find()
                what = f"gradient of the dense net's {name}" if name else "norm of the dense net's gradients"
                raise NonFiniteError(f"step {step}: the {what} is not finite; {_REMEDY}")
            return 1.0
        norms = [each.norm(step) for each in self._hosted]
        mine = squared_norm if math.isfinite(loss) else math.nan
        total = self._sum(mine) + sum(norm.wait() for norm in norms)
        scale = self._scale(step, total)
        if self._group.rank() == 0:
            for sent in self._sent:
                sent.wait()  # long answered: the norms came after them
            self._sent = [each.call_barrier(UpdateBarrier.decide, step, scale) for each in self._hosted]
        return scale

    def _sum(self, value: float) -> float:
        """Sum over trainers."""
        if self._group.size() == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self._group)
        return total.item()

    def _scale(self, step: int, squared_norm: float) -> float | None:
        if not math.isfinite(squared_norm):
            if self._rules.check_finite:
                raise NonFiniteError(f"step {step}: the norm of the gradients is {math.sqrt(squared_norm)}")
            return None
        if self._rules.clip_norm is None:
            return 1.0
        return min(1.0, self._rules.clip_norm / (math.sqrt(squared_norm) + _CLIP_EPS))
