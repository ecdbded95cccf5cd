"""The loss of a step: for each task, the weighted mean over the samples of all trainers.

::

    loss = sum over tasks t:  weight_t * sum over samples b: w_bt * value_bt / sum over samples b: w_bt

Sums are over the global batch. The loss of a trainer is its local sum divided by the sum of all weights, so
that the losses of the trainers add up. A task whose weights are all 0 contributes 0.

If a task also has a ranking loss (:mod:`.ranking_losses`), its loss is the weighted mean of the two losses.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import add
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.batch import Batch, by_task, split_outputs
from hybrid.config import TaskSection
from hybrid.engine.ranking_losses import RANKING
from hybrid.errors import ConfigError
from hybrid.primitives.device_copies import to_device
from hybrid.user_code.user_modules import describe_error, load_function

# Takes outputs_B, or outputs_BC of C classes, labels_B, and the keyword reduction, "none" or "mean".
Loss: TypeAlias = Callable[..., Tensor]


class Objective:
    """The loss of a configured run, over all its tasks.

    Args:
        tasks: the tasks, in the order of labels and outputs.

    Raises:
        ConfigError: a custom loss cannot be imported, fails, or does not return one value per sample.
    """

    def __init__(self, tasks: Mapping[str, TaskSection]) -> None:
        self._tasks = list(tasks.values())
        self._losses = [_loss(name, task) for name, task in tasks.items()]
        self._num_outputs = [task.num_outputs for task in tasks.values()]

    def __call__(self, outputs_BO: Tensor, batch: Batch) -> Tensor:
        """Return the contribution of local samples to the loss of the global batch; zero for no samples.

        Args:
            outputs_BO: outputs of the dense net, (B,) for one output.
            batch: labels and weights may be on another device than the outputs, and of another type.

        Raises:
            ConfigError: a custom loss does not return one value per sample.
            DataError: a sample that counts in a ``listwise`` ranking loss has a negative label.
        """
        if not len(batch.labels):
            return outputs_BO.sum()
        outputs = split_outputs(outputs_BO, self._num_outputs)
        return reduce(add, [self._task_loss(t, outputs_B, batch) for t, outputs_B in enumerate(outputs)])

    def _task_loss(self, t: int, outputs_B: Tensor, batch: Batch) -> Tensor:
        task = self._tasks[t]
        if not task.ranking_loss:
            loss = self._mean_loss(t, outputs_B, batch)
        else:
            loss = task.ranking_fraction * self._ranking_loss(t, outputs_B, batch)
            if task.ranking_fraction < 1:
                loss = loss + (1 - task.ranking_fraction) * self._mean_loss(t, outputs_B, batch)
        return loss if task.weight == 1 else loss * task.weight

    def _mean_loss(self, t: int, outputs_B: Tensor, batch: Batch) -> Tensor:
        labels_B = self._column(batch.labels, t, outputs_B)
        if batch.weights is None:
            # A mean times a fraction, not a sum over a size: with one trainer the fraction is 1, and all
            # gradients are bit-identical to those of torch's mean.
            return self._losses[t](outputs_B, labels_B, reduction="mean") * (
                len(labels_B) / batch.global_size
            )
        assert batch.total_weights is not None, "batches with weights have their totals"
        values_B = self._losses[t](outputs_B, labels_B, reduction="none")
        weights_B = self._column(batch.weights, t, outputs_B)
        return weighted_summand(values_B, weights_B, batch.total_weights[t].item())

    def _ranking_loss(self, t: int, outputs_B: Tensor, batch: Batch) -> Tensor:
        assert batch.groups is not None, "a ranking loss needs groups"
        assert batch.total_ranking_weights is not None, "batches with groups have their totals"
        labels_B, weights_B = by_task(batch.labels, len(self._tasks))[:, t], None
        if batch.weights is not None:
            weights_B = by_task(batch.weights, len(self._tasks))[:, t]
        ranking_loss = RANKING[self._tasks[t].ranking_call.name]
        values_B, counts_B = ranking_loss(outputs_B, labels_B, batch.groups, weights_B)
        return weighted_summand(values_B, counts_B, batch.total_ranking_weights[t].item())

    def _column(self, values: Tensor, t: int, outputs: Tensor) -> Tensor:
        moved = to_device(values.to(outputs.dtype), outputs.device)  # whole, since a column is not contiguous
        return by_task(moved, len(self._losses))[:, t]


def weighted_summand(values_B: Tensor, weights_B: Tensor, total: float) -> Tensor:
    """Return the local contribution to a weighted mean; ``total`` is the sum of weights of all trainers."""
    return (values_B * weights_B).sum() / (total or 1.0)


def _loss(name: str, task: TaskSection) -> Loss:
    arguments = task.loss_call.arguments
    match task.loss_call.name:
        case "log_loss":
            return partial(_log_loss, **arguments)
        case "focal":
            return partial(_focal_loss, **arguments)
        case "squared":
            return F.mse_loss
        case "huber":
            return partial(F.huber_loss, **arguments)
        case "softmax":
            return lambda outputs_BC, labels_B, *, reduction: F.cross_entropy(
                outputs_BC, labels_B.long(), reduction=reduction, **arguments
            )
    return _custom_loss(name, task)


def _log_loss(
    outputs_B: Tensor, labels_B: Tensor, *, reduction: str, pos_weight: float, label_smoothing: float
) -> Tensor:
    labels_B = labels_B + label_smoothing * (0.5 - labels_B)
    weight = None if pos_weight == 1 else outputs_B.new_tensor(pos_weight)
    return F.binary_cross_entropy_with_logits(outputs_B, labels_B, reduction=reduction, pos_weight=weight)


def _focal_loss(outputs_B: Tensor, labels_B: Tensor, *, reduction: str, gamma: float) -> Tensor:
    """Return the log loss times (1 - p)^gamma; p is the probability of the label (Lin et al. 2017, eq. 4)."""
    log_loss_B = F.binary_cross_entropy_with_logits(outputs_B, labels_B, reduction="none")
    # Not below tiny, since the derivative of a power of zero is infinite for gamma < 1.
    wrong_B = -torch.expm1(-log_loss_B).clamp_max(-torch.finfo(log_loss_B.dtype).tiny)
    return _reduced(wrong_B.pow(gamma) * log_loss_B, reduction)


def _custom_loss(name: str, task: TaskSection) -> Loss:
    key = f"tasks.{name}.loss"
    function = load_function(key, task.loss, ("outputs", "labels"))

    def loss(outputs_B: Tensor, labels_B: Tensor, /, *, reduction: str) -> Tensor:
        labels_B = labels_B.long() if task.kind == "classes" else labels_B
        values_B = function(outputs_B, labels_B)
        shape = list(values_B.shape) if isinstance(values_B, Tensor) else type(values_B).__name__
        if shape != [len(labels_B)]:
            rule = f"must return one value per sample, {[len(labels_B)]}, but returns {shape}"
            raise ConfigError(key, rule, task.loss)
        return _reduced(values_B, reduction)

    outputs_BC = torch.zeros(2, task.num_outputs, requires_grad=True)
    outputs = outputs_BC if task.kind == "classes" else outputs_BC.squeeze(1)
    try:
        loss(outputs, torch.zeros(2), reduction="mean").backward()
    except ConfigError:
        raise
    except Exception as error:  # user code may raise anything
        reason = " ".join(f"fails for two samples: {describe_error(error)}".split())
        raise ConfigError(key, reason, task.loss) from error
    return loss


def _reduced(values_B: Tensor, reduction: str) -> Tensor:
    return values_B.mean() if reduction == "mean" else values_B
