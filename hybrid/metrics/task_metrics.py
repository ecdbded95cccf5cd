"""Metrics of a task, built-in and custom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from hybrid.config import TaskSection
from hybrid.config.task_sections import METRICS
from hybrid.errors import ConfigError
from hybrid.metrics.binary_metrics import binary_metrics, mean, probabilities
from hybrid.metrics.ranking_metrics import Ranking
from hybrid.user_code.function_names import load_function
from hybrid.user_code.tracebacks import describe_error

# Values by name; with several tasks, names begin with the name of the task.
Metrics: TypeAlias = Mapping[str, float]


def task_metrics(
    name: str,
    task: TaskSection,
    outputs_N: Tensor,
    labels_N: Tensor,
    groups_N: Tensor | None,
    weights_N: Tensor | None = None,
) -> dict[str, float]:
    """Compute all metrics of one task in float64; NaN without samples.

    Args:
        outputs_N: outputs of the dense net; (N, C) for C classes.
        groups_N: the group of each sample, for ranking metrics.
        weights_N: weights above 0, for the metrics of the task's kind only; None for equal weights.

    Raises:
        ConfigError: a custom metric fails, or returns no number.
    """
    if not len(labels_N):
        return {**dict.fromkeys(task.metric_names, float("nan")), "num_samples": 0}
    found = _common_metrics(task, outputs_N, labels_N, weights_N)
    predicted_N = predicted(task, outputs_N)
    ranking = None
    for metric in task.metrics:
        if ":" in metric:
            function = _load_metric(name, metric)
            try:
                found[metric.rpartition(":")[2]] = float(function(predicted_N, labels_N))
            except Exception as error:  # user code may raise anything
                reason = f"fails, or returns no number: {describe_error(error)}"
                raise ConfigError(f"tasks.{name}.metrics", " ".join(reason.split()), metric) from error
            continue
        assert groups_N is not None, "data.group is set where metrics want groups"
        if predicted_N.isnan().any():
            found[metric] = float("nan")
            continue
        ranking = ranking or Ranking.of(predicted_N.numpy(), labels_N.double().numpy(), groups_N.numpy())
        kind, _, k = metric.partition("@")
        match kind:
            case "gauc":
                found[metric] = ranking.gauc()
            case "mrr":
                found[metric] = ranking.mrr()
            case "ndcg":
                found[metric] = ranking.ndcg(int(k))
            case _:
                found[metric] = ranking.recall(int(k))
    return found


def check_custom_metrics(tasks: Mapping[str, TaskSection]) -> None:
    """Raise ConfigError if a custom metric cannot be imported."""
    for name, task in tasks.items():
        for metric in task.metrics:
            if ":" in metric:
                _load_metric(name, metric)


def score(task: TaskSection, outputs_N: Tensor, labels_N: Tensor) -> float:
    """Return the default score of a task; NaN without samples."""
    return _common_metrics(task, outputs_N, labels_N)[task.score] if len(labels_N) else float("nan")


def predicted(task: TaskSection, outputs_N: Tensor) -> Tensor:
    """Return predictions in float64: probabilities, (N, C) for C classes, or numbers."""
    if task.kind == "binary":
        return probabilities(outputs_N)
    outputs_N = outputs_N.detach().double()
    return outputs_N if task.kind == "regression" else outputs_N.softmax(dim=1)


def _common_metrics(
    task: TaskSection, outputs_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None
) -> dict[str, float]:
    if task.kind == "binary":
        return binary_metrics(outputs_N, labels_N, weights_N).as_dict()
    outputs_N, labels_N = outputs_N.detach().double(), labels_N.double()
    weights_N = None if weights_N is None else weights_N.double()
    if task.kind == "regression":
        error_N = outputs_N - labels_N
        values = (mean(error_N.square(), weights_N).sqrt(), mean(error_N.abs(), weights_N))
    else:
        is_right_N = (outputs_N.argmax(dim=1) == labels_N).double()
        is_right = mean(is_right_N, weights_N)
        if weights_N is None:
            values = (is_right, F.cross_entropy(outputs_N, labels_N.long()))
        else:
            losses_N = F.cross_entropy(outputs_N, labels_N.long(), reduction="none")
            values = (is_right, mean(losses_N, weights_N))
    numbers = [value.item() for value in values]
    return dict(zip(METRICS[task.kind], [*numbers, len(labels_N)], strict=True))


def _load_metric(name: str, metric: str) -> Callable[..., Any]:
    return load_function(f"tasks.{name}.metrics", metric, ("predictions", "labels"))
