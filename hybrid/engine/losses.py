"""What a step minimises: of each task, the weighted mean of a loss over the samples of all trainers.

::

    loss = sum over tasks t:  weight_t * sum over samples b: w_bt * value_bt / sum over samples b: w_bt

Sums go over the global batch, so a trainer's part is its own sum over the whole of the weights, and the parts
add up. A task of which no sample counts (all its weights are 0) adds 0.

A task with a ranking loss has ``(1 - share) * loss + share * ranking loss`` in place of its loss
(:mod:`hybrid.engine.ranking_losses`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.batch import Batch, by_task, split_outputs
from hybrid.config import TaskSection
from hybrid.engine.hybrid_model import to_device
from hybrid.engine.ranking_losses import RANKING
from hybrid.errors import ConfigError
from hybrid.user_code.function_names import load_function
from hybrid.user_code.tracebacks import describe_error

# Of outputs_B (outputs_BC of C classes), labels_B, and "none" for values_B or "mean" for the mean of these.
Loss: TypeAlias = Callable[[Tensor, Tensor, str], Tensor]


class Objective:
    """The loss of a run.

    Args:
        tasks: what is predicted, in the order of the labels and outputs.

    Raises:
        ConfigError: a loss of the user's own cannot be had, or does not give one value a sample.
    """

    def __init__(self, tasks: Mapping[str, TaskSection]) -> None:
        self._tasks = list(tasks.values())
        self._losses = [_loss(name, task) for name, task in tasks.items()]
        self._num_outputs = [task.num_outputs for task in tasks.values()]

    def __call__(self, outputs_BO: Tensor, batch: Batch) -> Tensor:
        """What some samples add to the loss of the global batch; zero where there are none.

        Args:
            outputs_BO: of the dense net, (B,) where there is one.
            batch: the samples; labels and weights may be elsewhere, and of another precision.
        """
        if not len(batch.labels):
            return outputs_BO.sum()
        outputs = split_outputs(outputs_BO, self._num_outputs)
        labels, weights = self._columns(batch.labels, outputs_BO), None
        if batch.weights is not None:
            weights = self._columns(batch.weights, outputs_BO)
        parts = [
            self._part(t, outputs[t], labels[t], None if weights is None else weights[t], batch)
            for t in range(len(outputs))
        ]
        return reduce(add, parts)

    def _part(
        self, t: int, outputs_B: Tensor, labels_B: Tensor, weights_B: Tensor | None, batch: Batch
    ) -> Tensor:
        task = self._tasks[t]
        if not task.ranking_loss:
            part = self._part_of_mean(t, outputs_B, labels_B, weights_B, batch)
        else:
            part = task.ranking_fraction * self._part_of_order(t, outputs_B, batch)
            if task.ranking_fraction < 1:
                mean = self._part_of_mean(t, outputs_B, labels_B, weights_B, batch)
                part = part + (1 - task.ranking_fraction) * mean
        return part if task.weight == 1 else part * task.weight

    def _part_of_mean(
        self, t: int, outputs_B: Tensor, labels_B: Tensor, weights_B: Tensor | None, batch: Batch
    ) -> Tensor:
        if weights_B is None:
            # A mean times a share, not a sum over a size: with one trainer the share is 1 and every gradient
            # has the bits of torch's own mean.
            return self._losses[t](outputs_B, labels_B, "mean") * (len(labels_B) / batch.global_size)
        assert batch.total_weights is not None, "who gives a batch weights gives their sums too"
        values_B = self._losses[t](outputs_B, labels_B, "none")
        return weighted_part(values_B, weights_B, batch.total_weights[t].item())

    def _part_of_order(self, t: int, outputs_B: Tensor, batch: Batch) -> Tensor:
        assert batch.groups is not None, "who has a ranking loss gives batches groups"
        assert batch.total_groups is not None, "and their sums"
        labels_B, weights_B = by_task(batch.labels, len(self._tasks))[:, t], None
        if batch.weights is not None:
            weights_B = by_task(batch.weights, len(self._tasks))[:, t]
        ranking_loss = RANKING[self._tasks[t].ranking_call.name]
        values_B, counts_B = ranking_loss(outputs_B, labels_B, batch.groups, weights_B)
        return weighted_part(values_B, counts_B, batch.total_groups[t].item())

    def _columns(self, values: Tensor, outputs: Tensor) -> Sequence[Tensor]:
        """One for each task, of the precision of ``outputs``, and where these are."""
        moved = to_device(values.to(outputs.dtype), outputs.device)
        return by_task(moved, len(self._losses)).unbind(1)


def weighted_part(values_B: Tensor, weights_B: Tensor, total: float) -> Tensor:
    """What some samples add to a weighted mean over all samples, whose weights add up to ``total``."""
    return (values_B * weights_B).sum() / (total or 1.0)


def _loss(name: str, task: TaskSection) -> Loss:
    match task.loss_name:
        case "log_loss":
            return _log_loss
        case "focal":
            return partial(_focal_loss, task.loss_call["gamma"])
        case "squared":
            return _squared_loss
        case "huber":
            return partial(_huber_loss, task.loss_call["delta"])
        case "softmax":
            return _softmax_loss
    return _own_loss(name, task)


def _log_loss(outputs_B: Tensor, labels_B: Tensor, reduction: str) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs_B, labels_B, reduction=reduction)


def _focal_loss(gamma: float, outputs_B: Tensor, labels_B: Tensor, reduction: str) -> Tensor:
    """The log loss times (1 - p)^gamma, where p is the probability of what is so (Lin et al. 2017, eq. 4)."""
    log_loss_B = _log_loss(outputs_B, labels_B, "none")
    # No power of zero: its derivative is infinite where gamma is below 1.
    wrong_B = -torch.expm1(-log_loss_B).clamp_max(-torch.finfo(log_loss_B.dtype).tiny)
    return _reduced(wrong_B.pow(gamma) * log_loss_B, reduction)


def _squared_loss(outputs_B: Tensor, labels_B: Tensor, reduction: str) -> Tensor:
    return F.mse_loss(outputs_B, labels_B, reduction=reduction)


def _huber_loss(delta: float, outputs_B: Tensor, labels_B: Tensor, reduction: str) -> Tensor:
    return F.huber_loss(outputs_B, labels_B, reduction=reduction, delta=delta)


def _softmax_loss(outputs_BC: Tensor, labels_B: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(outputs_BC, labels_B.long(), reduction=reduction)


def _own_loss(name: str, task: TaskSection) -> Loss:
    key = f"tasks.{name}.loss"
    function = load_function(key, task.loss, ("outputs", "labels"))

    def loss(outputs_B: Tensor, labels_B: Tensor, reduction: str) -> Tensor:
        labels_B = labels_B.long() if task.kind == "classes" else labels_B
        values_B = function(outputs_B, labels_B)
        found = list(values_B.shape) if isinstance(values_B, Tensor) else type(values_B).__name__
        if found != [len(labels_B)]:
            rule = f"must give one value a sample, {[len(labels_B)]}, and gives {found}"
            raise ConfigError(key, rule, task.loss)
        return _reduced(values_B, reduction)

    outputs_BC = torch.zeros(2, task.num_outputs, requires_grad=True)
    given = outputs_BC if task.kind == "classes" else outputs_BC.squeeze(1)
    try:
        loss(given, torch.zeros(2), "mean").backward()
    except ConfigError:
        raise
    except Exception as error:  # the user's own code, which may raise anything
        reason = " ".join(f"fails where it is given two samples: {describe_error(error)}".split())
        raise ConfigError(key, reason, task.loss) from error
    return loss


def _reduced(values_B: Tensor, reduction: str) -> Tensor:
    return values_B.mean() if reduction == "mean" else values_B
