"""Keys of [tasks.NAME]: labels, losses and metrics, and the rules between them.

The metrics of a single task have plain names (``auc``); with several tasks, the name of the task comes first
(``click.auc``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.config.key import USER_FUNCTION, Call, CallSignatures, argument, fixed, option
from hybrid.errors import ConfigError
from hybrid.input_spec import TaskSpec

TYPE_CALLS = CallSignatures(
    {"binary": (), "regression": (), "classes": (argument("count", int, None, minimum=2),)}
)
LABEL = "label"  # the task of a run without a section [tasks.NAME]
# The first of a kind is its default.
LOSSES = {"binary": ("log_loss", "focal"), "regression": ("squared", "huber"), "classes": ("softmax",)}
LOSS_CALLS = CallSignatures(
    {
        "log_loss": (),
        "focal": (argument("gamma", float, 2.0, minimum=0),),
        "squared": (),
        "huber": (argument("delta", float, 1.0, above=0),),
        "softmax": (),
    },
    others=rf"|{USER_FUNCTION}",
    others_rule="module:function",
)
_FRACTION = argument("fraction", float, 0.5, above=0, maximum=1)
RANKING_CALLS = CallSignatures(
    {"pairwise": (_FRACTION,), "listwise": (_FRACTION,)}, others="", others_rule='""'
)
# The metrics of each kind; the first is the main metric.
METRICS = {
    "binary": (
        "auc",
        "log_loss",
        "normalised_entropy",
        "calibration",
        "accuracy",
        "base_rate",
        "num_samples",
    ),
    "regression": ("rmse", "mae", "num_samples"),
    "classes": ("accuracy", "log_loss", "num_samples"),
}
# Additional metrics of the order within each group.
GROUP_METRICS: dict[str, tuple[str, ...]] = {
    "binary": (r"gauc", r"mrr", r"ndcg@[1-9]\d*", r"recall@[1-9]\d*"),
    "regression": (r"ndcg@[1-9]\d*",),
    "classes": (),
}
# The metrics that an evaluation shows.
_SHOWN = {
    "binary": ("auc", "log_loss", "normalised_entropy", "calibration"),
    "regression": ("rmse", "mae"),
    "classes": ("accuracy", "log_loss"),
}
_LOWER_IS_BETTER = ("log_loss", "normalised_entropy", "rmse", "mae")
_NOT_COMPARABLE = ("calibration", "base_rate", "num_samples")
_ACRONYMS = ("auc", "gauc", "mae", "mrr", "ndcg", "rmse")
_NAME = r"[A-Za-z_][\w-]*"


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """A task: its labels, loss and metrics. Without sections, data.label is the only task."""

    label: str = fixed("", "Label column; empty for the column of the task's name.")
    type: str = fixed(
        "binary",
        "Labels of 0 and 1, numbers, or classes from 0, of which there are `count`.",
        signatures=TYPE_CALLS,
    )
    mask: str = fixed(
        "",
        "Column of 1 and 0 that selects the samples of this task, such as clicked for a label "
        "bought; empty for all samples.",
    )
    loss: str = option(
        "",
        "log_loss or focal (binary), squared or huber (regression), softmax (classes), or your function, "
        "which returns one value per sample; empty for the first of its kind. A larger `gamma` counts "
        "correct samples less; beyond an error of `delta`, huber grows linearly.",
        signatures=LOSS_CALLS,
        prepares=False,
    )
    ranking_loss: str = option(
        "",
        "Loss of the order within each data.group, beside loss: pairwise (RankNet) or listwise (softmax "
        "cross-entropy); empty for none. `fraction` is its fraction of the task's loss. Groups then stay "
        "whole in a step (binary, regression).",
        signatures=RANKING_CALLS,
        is_name_fixed=True,
        prepares=False,
    )
    weight: float = option(1.0, "Weight of the task's loss.", above=0, prepares=False)
    metrics: tuple[str, ...] = option(
        (),
        "Additional metrics: gauc, mrr, ndcg@K and recall@K, within each data.group, or your "
        "functions as module:function.",
        prepares=False,
    )

    @property
    def kind(self) -> str:
        """``binary``, ``regression`` or ``classes``."""
        return TYPE_CALLS.parse("type", self.type).name

    @property
    def classes(self) -> int:
        """The number of classes; 0 of other kinds."""
        return int(TYPE_CALLS.parse("type", self.type).arguments.get("count", 0))

    @property
    def loss_name(self) -> str:
        """The name of the loss."""
        return self.loss_call.name

    @property
    def loss_call(self) -> Call:
        """The name of the loss and its arguments."""
        return LOSS_CALLS.parse("loss", self.loss or LOSSES[self.kind][0])

    @property
    def ranking_call(self) -> Call:
        """The name of the ranking loss and its arguments, of a task that has one."""
        return RANKING_CALLS.parse("ranking_loss", self.ranking_loss)

    @property
    def ranking_fraction(self) -> float:
        """The fraction of the ranking loss in the task's loss."""
        return float(self.ranking_call["fraction"]) if self.ranking_loss else 0.0

    @property
    def metric_names(self) -> tuple[str, ...]:
        """All metrics of the task; custom functions by the last segment of their names."""
        return (*METRICS[self.kind], *(metric.rpartition(":")[2] for metric in self.metrics))

    @property
    def score(self) -> str:
        """The main metric of the task."""
        return METRICS[self.kind][0]

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the dense net for this task."""
        return self.classes if self.kind == "classes" else 1

    def spec(self, name: str) -> TaskSpec:
        """Return the labels that batches hold of the task."""
        return TaskSpec(name, self.kind, self.classes)


def metric_name(tasks: Mapping[str, TaskSection], task: str, metric: str) -> str:
    """Return the full name of a metric of one of ``tasks``."""
    return f"{task}.{metric}" if len(tasks) > 1 else metric


def leading_score(tasks: Mapping[str, TaskSection]) -> str:
    """Return the main metric of a run: that of its first task."""
    name, task = next(iter(tasks.items()))
    return metric_name(tasks, name, task.score)


def shown_metrics(tasks: Mapping[str, TaskSection]) -> list[str]:
    """Return the metrics that an evaluation shows; the first is the main metric."""
    return [
        metric_name(tasks, name, metric)
        for name, task in tasks.items()
        for metric in (*_SHOWN[task.kind], *task.metric_names[len(METRICS[task.kind]) :])
    ]


def metric_title(name: str) -> str:
    """Return the title of a metric: "click NDCG@10" for ``click.ndcg@10``."""
    task, _, metric = name.rpartition(".")
    kind, at, k = metric.partition("@")
    # The stored name keeps its British spelling, since runs and configurations have it.
    words = kind.replace("_", " ").replace("normalised", "normalized")
    title = kind.upper() if kind in _ACRONYMS else words
    return f"{task} {title}{at}{k}".lstrip()


def is_lower_better(metric: str) -> bool:
    """Whether a smaller value is better. A larger value of a custom metric is better."""
    return metric.rpartition(".")[2] in _LOWER_IS_BETTER


def check_tasks(tasks: Mapping[str, TaskSection], group: str, best: str) -> None:
    """Raise ConfigError if keys of the tasks contradict each other.

    Args:
        group: ``data.group``.
        best: ``checkpoint.keep_best``.
    """
    comparable = []
    for name, task in tasks.items():
        if not re.fullmatch(_NAME, name):
            raise ConfigError(f"tasks.{name}", "must be named by letters, digits, _ and -, a letter first")
        _check_losses(name, task, group)
        _check_metrics(name, task, group)
        comparable += [metric_name(tasks, name, m) for m in task.metric_names if m not in _NOT_COMPARABLE]
    if best not in ("auto", "none", *comparable):
        raise ConfigError(
            "checkpoint.keep_best", f"must be auto, none, or one of {', '.join(comparable)}", best
        )


def _check_losses(name: str, task: TaskSection, group: str) -> None:
    if task.mask and task.mask == task.label:
        raise ConfigError(f"tasks.{name}.mask", "must be another column than its label", task.mask)
    losses = LOSSES[task.kind]
    if task.loss_name not in losses and not re.fullmatch(USER_FUNCTION, task.loss_name):
        rule = f"must be {' or '.join(losses)} where type is {task.kind}, or module:function"
        raise ConfigError(f"tasks.{name}.loss", rule, task.loss)
    loss, key = task.ranking_loss, f"tasks.{name}.ranking_loss"
    if loss and task.kind == "classes":
        raise ConfigError(key, "is of type binary or regression: classes have no order", loss)
    if loss and not group:
        raise ConfigError(key, "needs data.group, the column whose values make groups", loss)


def _check_metrics(name: str, task: TaskSection, group: str) -> None:
    allowed, key = GROUP_METRICS[task.kind], f"tasks.{name}.metrics"
    for metric in task.metrics:
        if re.fullmatch(USER_FUNCTION, metric):
            continue
        if not any(re.fullmatch(form, metric) for form in allowed):
            forms = [form.partition("@")[0] + "@K" * ("@" in form) for form in allowed]
            rule = f"must hold {', '.join((*forms, 'module:function'))} where type is {task.kind}"
            raise ConfigError(key, rule, metric)
        if not group:
            raise ConfigError(key, "needs data.group, the column whose values make groups", metric)
    if len(set(task.metric_names)) < len(task.metric_names):
        raise ConfigError(key, "must name each metric once, and custom ones differently", task.metrics)
