"""What the outputs of a dense net become for whoever uses the model: predictions by task, under their names.

Those of a binary task are ``click.probability``, of a regression ``spent.value``, of classes
``stars.probability``, one for each; where there is one task, its name is left out.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid.batch import split_outputs
from hybrid.config import TaskSection
from hybrid.config.task_sections import metric_name
from hybrid.metrics import predicted


def prediction_names(tasks: Mapping[str, TaskSection]) -> list[str]:
    """That of the prediction of each task."""
    return [
        metric_name(tasks, name, "value" if task.kind == "regression" else "probability")
        for name, task in tasks.items()
    ]


def predictions(tasks: Mapping[str, TaskSection], outputs_BO: Tensor) -> dict[str, Tensor]:
    """What a served model gives, of the type of its outputs: (B,), or (B, C) of C classes."""
    found = {}
    for name, task, of_task in _by_task(tasks, outputs_BO):
        match task.kind:
            case "binary":
                found[name] = of_task.sigmoid()
            case "classes":
                found[name] = of_task.softmax(dim=1)
            case _:
                found[name] = of_task
    return found


def column_names(tasks: Mapping[str, TaskSection]) -> list[str]:
    """Those of the predictions in a file: of C classes ``stars.probability.0`` and on."""
    return list(prediction_columns(tasks, torch.zeros(0, sum(task.num_outputs for task in tasks.values()))))


def prediction_columns(tasks: Mapping[str, TaskSection], outputs_NO: Tensor) -> dict[str, Tensor]:
    """Predictions as columns of a file, in float64."""
    found: dict[str, Tensor] = {}
    for name, task, of_task in _by_task(tasks, outputs_NO):
        columns_NC = predicted(task, of_task)
        if task.kind == "classes":
            found |= {f"{name}.{number}": one_N for number, one_N in enumerate(columns_NC.unbind(1))}
        else:
            found[name] = columns_NC
    return found


def _by_task(tasks: Mapping[str, TaskSection], outputs_BO: Tensor) -> list[tuple[str, TaskSection, Tensor]]:
    num_outputs = [task.num_outputs for task in tasks.values()]
    parts = split_outputs(outputs_BO, num_outputs)
    return list(zip(prediction_names(tasks), tasks.values(), parts, strict=True))
