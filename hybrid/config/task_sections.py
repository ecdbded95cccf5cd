"""What is predicted of a sample: sections [tasks.NAME], their metrics, and the rules that tie them together.

Where there is one task, its metrics have their plain names (``auc``); where there are several, its name comes
first (``click.auc``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.config.call import Call, Signatures, argument
from hybrid.config.key import USER_FUNCTION, fixed, option
from hybrid.errors import ConfigError
from hybrid.input_spec import TaskSpec

TYPE_CALLS = Signatures(
    {"binary": (), "regression": (), "classes": (argument("count", int, None, minimum=2),)}
)
LABEL = "label"  # the task of a run without a section [tasks.NAME]
# The first is that of a task that names none.
LOSSES = {"binary": ("log_loss", "focal"), "regression": ("squared", "huber"), "classes": ("softmax",)}
LOSS_CALLS = Signatures(
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
RANKING_CALLS = Signatures({"pairwise": (_FRACTION,), "listwise": (_FRACTION,)}, others="", others_rule='""')
# What every task of a kind is measured by; the first is what a run is judged by.
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
# What more may be asked for, of the order within each group.
GROUP_METRICS: dict[str, tuple[str, ...]] = {
    "binary": (r"gauc", r"mrr", r"ndcg@[1-9]\d*", r"recall@[1-9]\d*"),
    "regression": (r"ndcg@[1-9]\d*",),
    "classes": (),
}
# What is shown of them at an evaluation.
_SHOWN = {
    "binary": ("auc", "log_loss", "normalised_entropy", "calibration"),
    "regression": ("rmse", "mae"),
    "classes": ("accuracy", "log_loss"),
}
_LOWER_IS_BETTER = ("log_loss", "normalised_entropy", "rmse", "mae")
_SAYS_NOTHING = ("calibration", "base_rate", "num_samples")  # of which of two models is better
_ACRONYMS = ("auc", "gauc", "mae", "mrr", "ndcg", "rmse")
_NAME = r"[A-Za-z_][\w-]*"


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """What the model predicts of a sample, and how it is judged; without any, data.label is the one task."""

    label: str = fixed("", "name of the label column; empty for that of the task's name")
    type: str = fixed(
        "binary",
        "Labels of 0 and 1, numbers, or classes from 0, of which there are `count`.",
        signatures=TYPE_CALLS,
    )
    mask: str = fixed(
        "",
        "column that says by 1 and 0 which samples count for this task, such as whether an item was clicked "
        "where the label is whether it was bought; empty for all",
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
    weight: float = option(1.0, "of its loss among those of all tasks", above=0, prepares=False)
    metrics: tuple[str, ...] = option(
        (),
        "more metrics of the test rows: gauc, mrr, ndcg@K, recall@K, of the order in each data.group, "
        "or your own as module:function",
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
        """``loss``, or that of the kind."""
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
        """Everything that it is measured by, own functions by the last part of their names."""
        return (*METRICS[self.kind], *(metric.rpartition(":")[2] for metric in self.metrics))

    @property
    def score(self) -> str:
        """The metric that it is judged by where no other is chosen."""
        return METRICS[self.kind][0]

    @property
    def num_outputs(self) -> int:
        """How many numbers the dense net gives of a sample for this task."""
        return self.classes if self.kind == "classes" else 1

    def spec(self, name: str) -> TaskSpec:
        """What the batches hold of it."""
        return TaskSpec(name, self.kind, self.classes)


def metric_name(tasks: Mapping[str, TaskSection], task: str, metric: str) -> str:
    """The name of a metric of one of ``tasks``."""
    return f"{task}.{metric}" if len(tasks) > 1 else metric


def leading_score(tasks: Mapping[str, TaskSection]) -> str:
    """The metric that a run is judged by where no other is chosen: that of its first task."""
    name, task = next(iter(tasks.items()))
    return metric_name(tasks, name, task.score)


def shown_metrics(tasks: Mapping[str, TaskSection]) -> list[str]:
    """The metrics of all tasks that an evaluation shows; the first is the leading score."""
    return [
        metric_name(tasks, name, metric)
        for name, task in tasks.items()
        for metric in (*_SHOWN[task.kind], *task.metric_names[len(METRICS[task.kind]) :])
    ]


def metric_title(name: str) -> str:
    """A metric as it is shown: ``click.ndcg@10`` is "click NDCG@10"."""
    task, _, metric = name.rpartition(".")
    kind, at, k = metric.partition("@")
    title = kind.upper() if kind in _ACRONYMS else kind.replace("_", " ")
    return f"{task} {title}{at}{k}".lstrip()


def is_lower_better(metric: str) -> bool:
    """Whether of two models the one with the smaller value is better; own functions measure what is good."""
    return metric.rpartition(".")[2] in _LOWER_IS_BETTER


def check_tasks(tasks: Mapping[str, TaskSection], group: str, best: str) -> None:
    """ConfigError where the keys of the tasks do not go together.

    Args:
        group: ``data.group``.
        best: ``checkpoint.keep_best``.
    """
    comparable = []
    for name, task in tasks.items():
        if not re.fullmatch(_NAME, name):
            raise ConfigError(f"tasks.{name}", "must be named by letters, digits, _ and -, a letter first")
        _check_kind(name, task)
        _check_ranking_loss(name, task, group)
        _check_metrics(name, task, group)
        comparable += [metric_name(tasks, name, m) for m in task.metric_names if m not in _SAYS_NOTHING]
    if best not in ("auto", "none", *comparable):
        raise ConfigError(
            "checkpoint.keep_best", f"must be auto, none, or one of {', '.join(comparable)}", best
        )


def _check_kind(name: str, task: TaskSection) -> None:
    if task.mask and task.mask == task.label:
        raise ConfigError(f"tasks.{name}.mask", "must be another column than its label", task.mask)
    losses = LOSSES[task.kind]
    if task.loss_name not in losses and not re.fullmatch(USER_FUNCTION, task.loss_name):
        rule = f"must be {' or '.join(losses)} where type is {task.kind}, or module:function"
        raise ConfigError(f"tasks.{name}.loss", rule, task.loss)


def _check_ranking_loss(name: str, task: TaskSection, group: str) -> None:
    loss, key = task.ranking_loss, f"tasks.{name}.ranking_loss"
    if not loss:
        return
    if task.kind == "classes":
        raise ConfigError(key, "is of type binary or regression: classes have no order", loss)
    if not group:
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
        raise ConfigError(key, "must name each metric once, and own ones otherwise than those", task.metrics)
