"""Keys of [tasks.NAME]: labels, losses and metrics, and the rules between them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.config.key import BUILT_IN, USER_FUNCTION, Call, CallSignatures, argument, model, option, setting
from hybrid.errors import ConfigError

TYPE_CALLS = CallSignatures(
    {
        "binary": (),
        "regression": (),
        "classes": (argument("count", int, None, minimum=2),),
        "retrieval": (argument("item", str, None), argument("dim", int, 32, minimum=1)),
    }
)
LABEL = "label"  # the task of a run without a section [tasks.NAME]
# The first loss of a kind is the default.
LOSSES = {
    "binary": ("log_loss", "focal"),
    "regression": ("squared", "huber"),
    "classes": ("softmax",),
    "retrieval": ("in_batch",),
}
_SMOOTHING = argument("label_smoothing", float, 0.0, minimum=0, maximum=1)
LOSS_CALLS = CallSignatures(
    {
        "log_loss": (argument("pos_weight", float, 1.0, above=0), _SMOOTHING),
        "focal": (argument("gamma", float, 2.0, minimum=0),),
        "squared": (),
        "huber": (argument("delta", float, 1.0, above=0),),
        "softmax": (_SMOOTHING,),
        "in_batch": (argument("temperature", float, 0.1, above=0),),
    },
    others=rf"|{USER_FUNCTION}",
    others_rule="module:function",
)
_FRACTION = argument("fraction", float, 0.5, above=0, maximum=1)
RANKING_CALLS = CallSignatures(
    {"pairwise": (_FRACTION,), "listwise": (_FRACTION,)}, others="", others_rule='""'
)
# The metrics that an evaluation shows; the first metric of a kind is the main one.
_SHOWN = {
    "binary": ("auc", "log_loss", "normalized_entropy", "calibration"),
    "regression": ("rmse", "mae"),
    "classes": ("accuracy", "log_loss"),
    "retrieval": ("mrr",),
}
METRICS: dict[str, tuple[str, ...]] = {kind: (*shown, "num_samples") for kind, shown in _SHOWN.items()}
METRICS["binary"] = (*_SHOWN["binary"], "accuracy", "base_rate", "num_samples")
# Patterns of additional ranking metrics: of a retrieval task over all items, of others within each group.
RANKING_METRICS: dict[str, tuple[str, ...]] = {
    "binary": (r"gauc", r"mrr", r"ndcg@[1-9]\d*", r"recall@[1-9]\d*"),
    "regression": (r"ndcg@[1-9]\d*",),
    "classes": (),
    "retrieval": (r"ndcg@[1-9]\d*", r"recall@[1-9]\d*"),
}
_LOWER_IS_BETTER = ("log_loss", "normalized_entropy", "rmse", "mae")
_NOT_COMPARABLE = ("calibration", "base_rate", "num_samples")
_NEEDS_GROUP = "needs data.group, the column whose values group samples"
_ACRONYMS = ("auc", "gauc", "mae", "mrr", "ndcg", "rmse")


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """A task: its labels, loss and metrics. Without sections, data.label is the label of the only task."""

    label: str = model(
        "", "Label column; empty for the column of the task's name, or for retrieval if each row is a choice."
    )
    type: str = model(
        "binary",
        "Labels: 0 and 1 (binary), any numbers (regression), classes from 0 to `count` - 1, or 1 where a "
        "user chose the item in the column `item` (retrieval: docs/models.md; `dim` is the width of the "
        "vectors of users and items).",
        signatures=TYPE_CALLS,
    )
    mask: str = model(
        "",
        "Column of 1 and 0 that selects the samples of this task, such as clicked for a label "
        "bought; empty for all samples.",
    )
    loss: str = option(
        "",
        "log_loss or focal (binary), squared or huber (regression), softmax (classes), in_batch (retrieval), "
        "or your function, which returns one value per sample; empty for the first loss of the type. "
        "`temperature` divides the scores of in_batch. `pos_weight` multiplies "
        "the loss of samples with label 1. `label_smoothing` mixes this fraction of equal probabilities into "
        "the labels. A larger `gamma` gives well-classified samples less weight. Beyond an error of `delta`, "
        "huber grows linearly.",
        signatures=LOSS_CALLS,
        unsigned=BUILT_IN,
        prepares=False,
    )
    ranking_loss: str = setting(
        "",
        "Additional loss of the ranking within each data.group (binary, regression): pairwise (RankNet) or "
        "listwise (softmax cross-entropy); empty for none. `fraction` is its fraction of the task's loss. "
        "Steps then contain whole groups.",
        signatures=RANKING_CALLS,
        is_name_fixed=True,
        prepares=False,
    )
    weight: float = setting(1.0, "Weight of the task's loss.", above=0, prepares=False)
    metrics: tuple[str, ...] = option(
        (),
        "Additional metrics: gauc, mrr, ndcg@K and recall@K, within each data.group (retrieval: ndcg@K and "
        "recall@K among all items), or your functions as module:function.",
        unsigned=BUILT_IN,
        prepares=False,
    )

    type_call = TYPE_CALLS.property_of("type")
    ranking_call = RANKING_CALLS.property_of("ranking_loss")  # its name is empty without a ranking loss

    @property
    def kind(self) -> str:
        """``binary``, ``regression``, ``classes`` or ``retrieval``."""
        return self.type_call.name

    @property
    def classes(self) -> int:
        """The number of classes; 0 if ``kind`` is not ``classes``."""
        return int(self.type_call.arguments.get("count", 0))

    @property
    def item(self) -> str:
        """The item column of a retrieval task; KeyError for other tasks."""
        return str(self.type_call["item"])

    @property
    def is_item_label(self) -> bool:
        """Whether ``label`` is the item column of a retrieval task, so that each row is a chosen item."""
        return self.kind == "retrieval" and self.label == self.item

    @property
    def loss_call(self) -> Call:
        return LOSS_CALLS.parse("loss", self.loss or LOSSES[self.kind][0])

    @property
    def ranking_fraction(self) -> float:
        """The fraction of the ranking loss in the task's loss; 0 without a ranking loss."""
        return float(self.ranking_call["fraction"]) if self.ranking_loss else 0.0

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of all metrics of the task; a custom metric has the name of its function."""
        return (*METRICS[self.kind], *(metric.rpartition(":")[2] for metric in self.metrics))

    @property
    def main_metric(self) -> str:
        return METRICS[self.kind][0]

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the dense net; for retrieval, of the user and item towers together."""
        if self.kind == "retrieval":
            return 2 * int(self.type_call["dim"])
        return self.classes if self.kind == "classes" else 1


def metric_name(tasks: Mapping[str, TaskSection], task: str, metric: str) -> str:
    """Return ``TASK.METRIC`` if there are several tasks, else ``METRIC``."""
    return f"{task}.{metric}" if len(tasks) > 1 else metric


def main_metric(tasks: Mapping[str, TaskSection]) -> str:
    """Return the main metric of the first task, such as ``auc``, or ``click.auc`` with several tasks."""
    name, task = next(iter(tasks.items()))
    return metric_name(tasks, name, task.main_metric)


def shown_metrics(tasks: Mapping[str, TaskSection]) -> list[str]:
    """Return the metrics that an evaluation shows, as named by :func:`metric_name`; main metric first."""
    return [
        metric_name(tasks, name, metric)
        for name, task in tasks.items()
        for metric in (*_SHOWN[task.kind], *task.metric_names[len(METRICS[task.kind]) :])
    ]


def metric_title(name: str) -> str:
    """Return the title of a metric: "click NDCG@10" for ``click.ndcg@10``."""
    task, _, metric = name.rpartition(".")
    kind, at, k = metric.partition("@")
    title = kind.upper() if kind in _ACRONYMS else kind.replace("_", " ")
    return f"{task} {title}{at}{k}".lstrip()


def is_lower_better(metric: str) -> bool:
    """Return whether smaller values are better. Only the name decides, also for a custom metric."""
    return metric.rpartition(".")[2] in _LOWER_IS_BETTER


def check_tasks(tasks: Mapping[str, TaskSection], group: str, best: str) -> None:
    """Raise ConfigError if a task, data.group (``group``) or checkpoint.keep_best (``best``) is invalid."""
    comparable = []
    for name, task in tasks.items():
        if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
            rule = "must have letters, digits, _ and - only, and begin with a letter or _"
            raise ConfigError(f"tasks.{name}", rule)
        _check_task(name, task, group)
        comparable += [metric_name(tasks, name, m) for m in task.metric_names if m not in _NOT_COMPARABLE]
    if best not in ("auto", "none", *comparable):
        rule = f"must be auto, none, or one of {', '.join(comparable)}"
        raise ConfigError("checkpoint.keep_best", rule, best)


def _check_task(name: str, task: TaskSection, group: str) -> None:
    if task.mask and task.mask == task.label:
        raise ConfigError(f"tasks.{name}.mask", "must not be the label column of the task", task.mask)
    losses = LOSSES[task.kind]
    loss_name = task.loss_call.name
    # The loss and the metrics of a retrieval task need other samples, or all items, too.
    functions = () if task.kind == "retrieval" else ("module:function",)
    if loss_name not in losses and not (functions and re.fullmatch(USER_FUNCTION, loss_name)):
        rule = f"must be {' or '.join((*losses, *functions))} if type is {task.kind}"
        raise ConfigError(f"tasks.{name}.loss", rule, task.loss)
    if task.ranking_loss:
        key = f"tasks.{name}.ranking_loss"
        if task.kind not in ("binary", "regression"):
            rule = "needs type binary or regression, whose outputs have an order"
            raise ConfigError(key, rule, task.ranking_loss)
        if not group:
            raise ConfigError(key, _NEEDS_GROUP, task.ranking_loss)
    key = f"tasks.{name}.metrics"
    allowed = RANKING_METRICS[task.kind]
    for metric in task.metrics:
        if functions and re.fullmatch(USER_FUNCTION, metric):
            continue
        if not any(re.fullmatch(form, metric) for form in allowed):
            forms = [form.partition("@")[0] + "@K" * ("@" in form) for form in allowed]
            rule = f"must hold {', '.join((*forms, *functions))} if type is {task.kind}"
            raise ConfigError(key, rule, metric)
        if not group and task.kind != "retrieval":
            raise ConfigError(key, _NEEDS_GROUP, metric)
    if len(set(task.metric_names)) < len(task.metric_names):
        raise ConfigError(key, "must not have two metrics of the same name", task.metrics)
