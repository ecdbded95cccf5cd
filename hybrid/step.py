"""One training step, and one forward pass without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from hybrid.batch import Batch
from hybrid.clock import StepClock
from hybrid.model import to_device


class ContextOptimizer(Protocol):
    """An optimizer that finds its gradients in a distributed autograd context."""

    def step(self, context_id: int) -> None: ...


class StepResult(NamedTuple):
    """What one trainer has after a step.

    Attributes:
        loss: this trainer's part of the global batch's mean loss; the parts add up to it.
        logits: ``logits_B`` before the update, on the CPU.
    """

    loss: float
    logits: Tensor


def train_step(
    model: nn.Module, batch: Batch, optimizers: Sequence[ContextOptimizer], step: int, clock: StepClock
) -> StepResult:
    """One step of synchronous training, called by every trainer with its share of the global batch.

    Tables are updated at their workers, by the gradients that the backward pass delivers there.
    """
    with dist_autograd.context() as context_id:
        logits_B = model(batch, step, clock)
        with clock.phase("dense"):
            loss = _loss(logits_B, to_device(batch.labels, logits_B.device), batch.global_size)
        with clock.phase("backward"):
            dist_autograd.backward(context_id, [loss])
        with clock.phase("update"):
            for optimizer in optimizers:
                optimizer.step(context_id)
            return StepResult(loss.item(), logits_B.detach().cpu())


def _loss(logits_B: Tensor, labels_B: Tensor, global_size: int) -> Tensor:
    """This trainer's part of the mean over the global batch, and zero for an empty share.

    Written as a mean times a share, not a sum over a size: with one trainer the share is 1 and every
    gradient has the bits of torch's own mean.
    """
    if not len(labels_B):
        return logits_B.sum()
    mean = F.binary_cross_entropy_with_logits(logits_B, labels_B)
    return mean * (len(labels_B) / global_size)


def predict_step(model: nn.Module, batch: Batch, step: int, clock: StepClock) -> Tensor:
    """``logits_B`` on the CPU, with the rows as they are after ``step`` updates."""
    with torch.no_grad():
        logits_B: Tensor = model(batch, step, clock)
        return logits_B.cpu()
