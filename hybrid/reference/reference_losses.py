"""The loss of a step in plain torch: a sum over tasks of weighted means over samples or groups."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.batch import Batch
from hybrid.config import TaskSection
from hybrid.user_code.user_modules import load_function


class ReferenceLoss:
    """The loss of a run.

    Args:
        tasks: the tasks, in the order of labels and outputs.
        features: for a retrieval task, the names of the sparse features of a batch, in their order.
        item_counts: for a retrieval task, the number of training samples with each item id.
    """

    def __init__(
        self,
        tasks: Mapping[str, TaskSection],
        features: Sequence[str] = (),
        item_counts: Tensor | None = None,
    ) -> None:
        self._tasks = list(tasks.values())
        self._features = features
        self._item_counts = item_counts
        self._custom = {
            t: load_function(f"tasks.{name}.loss", task.loss)
            for t, (name, task) in enumerate(tasks.items())
            if ":" in task.loss
        }

    def contributions(self, outputs: Sequence[Tensor], slices: Sequence[Batch]) -> list[Tensor]:
        """Return terms whose sum is the loss of a step: one per trainer, then one per ranking loss of a task.

        A ranking loss is computed over the whole batch, since a group may have samples of several trainers.
        For a retrieval task, there is a single term for the whole batch.

        Args:
            outputs: the outputs for each trainer's samples, (samples, outputs).
            slices: each trainer's samples.
        """
        if self._item_counts is not None:
            return [self._retrieval_loss(torch.cat(list(outputs)), slices, self._item_counts)]
        has_weights = any(batch.weights is not None for batch in slices)
        num_outputs = [task.num_outputs for task in self._tasks]
        totals = [sum(_weights(s, t).sum().item() for s in slices) or 1.0 for t in range(len(num_outputs))]
        contributions = []
        for outputs_BO, batch in zip(outputs, slices, strict=True):
            if not len(batch.labels):
                contributions.append(outputs_BO.sum())
                continue
            columns = outputs_BO.split(num_outputs, dim=1)
            of_tasks = []
            for t, task in enumerate(self._tasks):
                labels_B = _column(batch.labels, t).to(outputs_BO.dtype)
                if has_weights:
                    values_B = self._loss(t, columns[t], labels_B, "none")
                    value = torch.dot(_weights(batch, t).to(values_B), values_B) / totals[t]
                else:
                    value = self._loss(t, columns[t], labels_B, "mean") * (len(labels_B) / totals[t])
                fraction = 1 - task.ranking_fraction if task.ranking_loss else 1.0
                of_tasks.append(value * (task.weight * fraction))
            contributions.append(torch.stack(of_tasks).sum())
        whole_BO, first = torch.cat(list(outputs)), 0
        for t, (task, number) in enumerate(zip(self._tasks, num_outputs, strict=True)):
            if task.ranking_loss:
                order = _ranking_loss(task.ranking_call.name, whole_BO[:, first], slices, t)
                contributions.append(order * task.weight * task.ranking_fraction)
            first += number
        return contributions

    def _loss(self, t: int, outputs_BO: Tensor, labels_B: Tensor, reduction: str) -> Tensor:
        task = self._tasks[t]
        is_classes = task.kind == "classes"
        outputs_B = outputs_BO if is_classes else outputs_BO.squeeze(1)
        labels_B = labels_B.long() if is_classes else labels_B
        if t in self._custom:
            return _reduced(self._custom[t](outputs_B, labels_B), reduction)
        match task.loss_call.name:
            case "softmax":
                smoothing = task.loss_call["label_smoothing"]
                return F.cross_entropy(outputs_B, labels_B, reduction=reduction, label_smoothing=smoothing)
            case "log_loss":
                smoothed_B = labels_B + task.loss_call["label_smoothing"] * (0.5 - labels_B)
                weight = task.loss_call["pos_weight"]
                weight_1 = None if weight == 1 else torch.full([1], weight).to(outputs_B)
                return F.binary_cross_entropy_with_logits(
                    outputs_B, smoothed_B, reduction=reduction, pos_weight=weight_1
                )
            case "focal":
                right_B = torch.where(labels_B > 0.5, outputs_B, -outputs_B).sigmoid()
                return _reduced(-((1 - right_B) ** task.loss_call["gamma"]) * right_B.log(), reduction)
            case "squared":
                return F.mse_loss(outputs_B, labels_B, reduction=reduction)
            case name:
                assert name == "huber", name
                return F.huber_loss(outputs_B, labels_B, reduction=reduction, delta=task.loss_call["delta"])

    def _retrieval_loss(self, outputs_NO: Tensor, slices: Sequence[Batch], counts_I: Tensor) -> Tensor:
        """Return the weighted mean in-batch cross-entropy of the samples with weights above 0."""
        (task,) = self._tasks
        feature = self._features.index(task.item)
        ids_N = torch.cat([batch.sparse_features.ids(feature) for batch in slices])
        weights_N = torch.cat([_weights(batch, 0) for batch in slices]).to(outputs_NO)
        is_chosen_N = weights_N > 0
        users_ND, items_ND = outputs_NO[is_chosen_N].tensor_split(2, dim=1)
        frequencies_I = counts_I.clamp(min=1) / counts_I.sum()
        corrections_N = frequencies_I[ids_N[is_chosen_N]].log().to(outputs_NO)
        scores_NN = users_ND @ items_ND.T / task.loss_call["temperature"] - corrections_N
        losses_N = F.cross_entropy(scores_NN, torch.arange(len(scores_NN)), reduction="none")
        return torch.dot(weights_N[is_chosen_N], losses_N) / (weights_N.sum() or 1.0) * task.weight


def _ranking_loss(loss: str, scores_N: Tensor, slices: Sequence[Batch], t: int) -> Tensor:
    """Return the mean loss of task ``t`` over groups with unequal labels, weighted by mean group weights."""
    labels_N = torch.cat([_column(batch.labels, t) for batch in slices]).to(scores_N)
    weights_N = torch.cat([_weights(batch, t) for batch in slices]).to(scores_N)
    groups = [batch.groups for batch in slices if batch.groups is not None]
    groups_N = torch.cat([torch.empty(0, dtype=torch.int64), *groups])
    weighted, total = scores_N.sum() * 0, 0.0
    for group in set(groups_N.tolist()):
        is_member_N = (groups_N == group) & (weights_N > 0)
        s, y, w = scores_N[is_member_N], labels_N[is_member_N], weights_N[is_member_N]
        if len(set(y.tolist())) > 1:
            if loss == "pairwise":  # RankNet, from the matrix of all pairs
                weights = (y[:, None] > y[None, :]).to(s) * w[:, None] * w[None, :]
                margins = s[None, :] - s[:, None]
                value = (weights * torch.logaddexp(torch.zeros_like(margins), margins)).sum() / weights.sum()
            else:  # the cross-entropy of the labels and the softmax of the scores
                value = -(w * y * s.log_softmax(0)).sum() / (w * y).sum()
            weighted, total = weighted + w.mean() * value, total + w.mean().item()
    return weighted / (total or 1.0)


def _reduced(values_B: Tensor, reduction: str) -> Tensor:
    return values_B.mean() if reduction == "mean" else values_B


def _column(values: Tensor, t: int) -> Tensor:
    return values if values.dim() == 1 else values[:, t]


def _weights(batch: Batch, t: int) -> Tensor:
    if batch.weights is None or not len(batch.labels):
        return torch.ones(len(batch.labels), dtype=torch.float64)
    return _column(batch.weights, t).double()
