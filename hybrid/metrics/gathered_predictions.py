"""Predictions for a test set, collected from trainers, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.batch import Batch, by_task, split_outputs
from hybrid.config import TaskSection
from hybrid.config.task_sections import metric_name
from hybrid.metrics.task_metrics import task_metrics


class Predictions(NamedTuple):
    """Predictions for N samples.

    Attributes:
        outputs: ``outputs_NO`` of the dense net, (N,) for one output.
        labels: ``labels_NT``, (N,) for one task.
        rows: ``rows_N``, equal for equal samples; see :meth:`hybrid.batch.Batch.row_keys`.
        weights: float32, with the shape of ``labels``: the weight of each sample for a task; None for equal
            weights. Samples of weight 0 count in no metric.
        groups: ``groups_N``; None without groups.
    """

    outputs: Tensor
    labels: Tensor
    rows: Tensor
    weights: Tensor | None = None
    groups: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, outputs_BO: Tensor, sequences: Sequence[int] = ()) -> Predictions:
        """Return the predictions for one batch.

        Args:
            sequences: indices of the features that are sequences.
        """
        return cls(outputs_BO, batch.labels, batch.row_keys(sequences), batch.weights, batch.groups)

    @classmethod
    def concatenate(cls, parts: Sequence[Predictions]) -> Predictions:
        """Concatenate the predictions for several batches."""
        columns = zip(*parts, strict=True)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def tied(self) -> Predictions:
        """Replace the outputs of equal samples by their mean.

        The last bits of a matrix product depend on the position of a row in its batch. They would break ties,
        so that the AUC would depend on the batch size and the number of trainers.
        """
        _, groups_N, sizes = self.rows.unique(return_inverse=True, return_counts=True)
        shape = (len(sizes), *self.outputs.shape[1:])
        sums = torch.zeros(shape, dtype=torch.float64).index_add_(0, groups_N, self.outputs.double())
        means = sums / sizes.view(-1, *[1] * (self.outputs.dim() - 1))
        return self._replace(outputs=means[groups_N].to(self.outputs.dtype))

    def of_tasks(self, tasks: Mapping[str, TaskSection]) -> dict[str, Tensor]:
        """Return the outputs of each task: (N,), or (N, C) for C classes."""
        num_outputs = [task.num_outputs for task in tasks.values()]
        return dict(zip(tasks, split_outputs(self.outputs, num_outputs), strict=True))

    def metrics(self, tasks: Mapping[str, TaskSection], *, is_weighted: bool = False) -> dict[str, float]:
        """Compute the metrics of each task over its samples, with ties for equal samples.

        Args:
            is_weighted: whether samples count by their weights (``data.weighted_metrics``), or once each.
        """
        found: dict[str, float] = {}
        labels_NT = by_task(self.labels, len(tasks))
        weights_NT = None if self.weights is None else by_task(self.weights, len(tasks))
        for t, (name, outputs_N) in enumerate(self.tied().of_tasks(tasks).items()):
            counts_N = slice(None) if weights_NT is None else weights_NT[:, t] > 0
            of_task = task_metrics(
                name,
                tasks[name],
                outputs_N[counts_N],
                labels_NT[counts_N, t],
                None if self.groups is None else self.groups[counts_N],
                weights_NT[counts_N, t] if is_weighted and weights_NT is not None else None,
            )
            found |= {metric_name(tasks, name, metric): value for metric, value in of_task.items()}
        return found
