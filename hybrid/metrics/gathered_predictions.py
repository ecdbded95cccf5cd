"""What a model makes of a test set, out of the parts that trainers have predicted."""

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
    """What a model makes of N samples.

    Attributes:
        outputs: ``outputs_NO`` of the dense net, (N,) where there is one.
        labels: ``labels_NT``, (N,) of one task.
        rows: ``rows_N``, which samples are equal; see :meth:`hybrid.batch.Batch.row_keys`.
        weights: float32 of the shape of ``labels``: how much each sample counts for a task in the loss; None
            for all the same. Those of weight 0 count in no metric.
        groups: ``groups_N``; None where there are none.
    """

    outputs: Tensor
    labels: Tensor
    rows: Tensor
    weights: Tensor | None = None
    groups: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, outputs_BO: Tensor, sequences: Sequence[int] = ()) -> Predictions:
        """Those of one batch.

        Args:
            sequences: numbers of the features that are sequences.
        """
        return cls(outputs_BO, batch.labels, batch.row_keys(sequences), batch.weights, batch.groups)

    @classmethod
    def concatenate(cls, parts: Sequence[Predictions]) -> Predictions:
        """Those of several batches, one after the other."""
        columns = zip(*parts, strict=True)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def tied(self) -> Predictions:
        """The same, with the same outputs for all equal samples: the mean of theirs.

        A matrix product gives equal rows other last bits at other places of a batch. Left so, ties would
        break by them, and the AUC be another with another size of batches or number of trainers.
        """
        _, groups_N, sizes = self.rows.unique(return_inverse=True, return_counts=True)
        shape = (len(sizes), *self.outputs.shape[1:])
        sums = torch.zeros(shape, dtype=torch.float64).index_add_(0, groups_N, self.outputs.double())
        means = sums / sizes.view(-1, *[1] * (self.outputs.dim() - 1))
        return self._replace(outputs=means[groups_N].to(self.outputs.dtype))

    def of_tasks(self, tasks: Mapping[str, TaskSection]) -> dict[str, Tensor]:
        """The outputs of each task: (N,), or (N, C) of C classes."""
        num_outputs = [task.num_outputs for task in tasks.values()]
        return dict(zip(tasks, split_outputs(self.outputs, num_outputs), strict=True))

    def metrics(self, tasks: Mapping[str, TaskSection], *, is_weighted: bool = False) -> dict[str, float]:
        """How good they are, equal samples tied; of each task over the samples that count for it.

        Args:
            is_weighted: whether these count by their weights (``data.weighted_metrics``), or each once.
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
