"""Predictions from the outputs of a dense net, by name.

The prediction of a binary task is ``click.probability``, of a regression ``spent.value``, of classes
``stars.probability``, one for each class. A single task has no prefix.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hybrid.batch import split_outputs
from hybrid.config import TaskSection
from hybrid.config.task_sections import metric_name
from hybrid.metrics import predicted


def prediction_names(tasks: Mapping[str, TaskSection]) -> list[str]:
    """Return the name of the prediction of each task."""
    return [
        metric_name(tasks, name, "value" if task.kind == "regression" else "probability")
        for name, task in tasks.items()
    ]


def predictions(tasks: Mapping[str, TaskSection], outputs_BO: Tensor) -> dict[str, Tensor]:
    """Return the predictions of a module, of shape (B,), or (B, C) for C classes."""
    activations = {"binary": torch.sigmoid, "classes": lambda logits_BC: logits_BC.softmax(dim=1)}
    return {
        name: activations.get(task.kind, lambda values: values)(outputs)
        for name, task, outputs in _by_task(tasks, outputs_BO)
    }


def column_names(tasks: Mapping[str, TaskSection]) -> list[str]:
    """Return the names of :func:`prediction_columns`."""
    return list(prediction_columns(tasks, torch.zeros(0, sum(task.num_outputs for task in tasks.values()))))


def prediction_columns(tasks: Mapping[str, TaskSection], outputs_NO: Tensor) -> dict[str, Tensor]:
    """Return predictions as float64 columns of a file; C classes are ``stars.probability.0`` and so on."""
    columns: dict[str, Tensor] = {}
    for name, task, outputs in _by_task(tasks, outputs_NO):
        values_NC = predicted(task, outputs)
        if task.kind == "classes":
            columns |= {f"{name}.{number}": column_N for number, column_N in enumerate(values_NC.unbind(1))}
        else:
            columns[name] = values_NC
    return columns


def _by_task(
    tasks: Mapping[str, TaskSection], outputs_BO: Tensor
) -> Iterator[tuple[str, TaskSection, Tensor]]:
    segments = split_outputs(outputs_BO, [task.num_outputs for task in tasks.values()])
    return zip(prediction_names(tasks), tasks.values(), segments, strict=True)
