"""The decision of trainers and workers whether an update is clipped, skipped, or applied unchanged.

::

    trainers                                            workers
    ────────                                            ───────
    after the backward pass: norm of the dense ──────►  merge the step's gradients
      gradients; request the norms of workers  ◄──────  respond with their norm, hold the update
    sum over trainers and workers; all compute
      the same scale, trainer 0 sends it       ──────►  apply the update, or drop it

The decision takes one round trip. Without clipping and skipping, there is no decision.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from hybrid.errors import NonFiniteError
from hybrid.primitives.pending_result import PendingResult
from hybrid.updates.barrier import UpdateBarrier
from hybrid.updates.update_rules import UpdateRules

# As in torch.nn.utils.clip_grad_norm_.
_CLIP_EPS = 1e-6
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
_REMEDY = 'lower the learning rates, look at the data, or set train.clip_norm or train.non_finite = "skip"'


class GuardedModule(Protocol):
    """A hosted module that waits for the decision about a step, or a stub of such a module."""

    def squared_norm(self, step: int) -> PendingResult[float]:
        """Return the squared norm of a step's gradients as a pending result, known once all have arrived."""

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> PendingResult[Result]:
        """Call a method of the module's :class:`UpdateBarrier`, and return its pending result."""


class Guard:
    """One trainer's side of the decisions to clip or skip updates.

    Args:
        hosted: all modules on workers that wait for decisions.
        group: all trainers.
    """

    def __init__(self, rules: UpdateRules, hosted: Sequence[GuardedModule], group: dist.ProcessGroup) -> None:
        self._rules = rules
        self._hosted = hosted
        self._group = group
        self._sent: list[PendingResult[None]] = []

    def check_loss(self, step: int, loss: float, find: Callable[[], str] | None) -> None:
        """Raise NonFiniteError for a non-finite loss, if ``train.non_finite`` stops the run.

        Args:
            find: returns a clause about the first non-finite tensor, or ""; None adds no clause.
        """
        if self._rules.check_finite and not math.isfinite(loss):
            found = "" if find is None else find()
            first = f": {found}" if found else ""
            raise NonFiniteError(
                f"step {step}: the loss of trainer {self._group.rank()} is {loss}{first}; {_REMEDY}"
            )

    def decide(
        self, step: int, loss: float, squared_norm: float, find: Callable[[], str | None]
    ) -> float | None:
        """Return the factor for a step's gradients, or None to skip the update; all trainers must call this.

        Args:
            loss: this trainer's summand of the loss.
            squared_norm: this trainer's summand of the squared norm of all dense gradients.
            find: returns the name of a parameter with a non-finite gradient, or None.

        Raises:
            NonFiniteError: ``train.non_finite`` stops the run, and a gradient of the dense net is not finite,
                or, with clipping, a gradient on a worker or a loss of any trainer.
        """
        if self._rules.check_finite and not math.isfinite(squared_norm):
            name = find()
            what = f"gradient of the dense net's {name}" if name else "norm of the dense net's gradients"
            raise NonFiniteError(f"step {step}: the {what} is not finite; {_REMEDY}")
        if not self._rules.has_update_guard:
            return 1.0
        norms = [each.squared_norm(step) for each in self._hosted]
        summand = squared_norm if math.isfinite(loss) else math.nan
        of_trainers = torch.tensor(summand, dtype=torch.float64)
        if self._group.size() > 1:
            dist.all_reduce(of_trainers, group=self._group)
        total = of_trainers.item() + sum(norm.wait() for norm in norms)
        scale: float | None = 1.0
        if not math.isfinite(total):
            if self._rules.check_finite:
                what = f"norm of the gradients on the workers is {math.sqrt(total)}"
                raise NonFiniteError(f"step {step}: the {what}; {_REMEDY}")
            scale = None
        elif self._rules.clip_norm is not None:
            scale = min(1.0, self._rules.clip_norm / (math.sqrt(total) + _CLIP_EPS))
        if self._group.rank() == 0:
            for sent in self._sent:
                sent.wait()  # ends at once: a worker sends a norm after it has the scale of the step before
            self._sent = [each.call_barrier(UpdateBarrier.set_scale, step, scale) for each in self._hosted]
        return scale
