"""Metrics of predictions: built-in and custom metrics of each task, and metrics of rankings in groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.batch import Batch, by_task, split_outputs
from hybrid.config import TaskSection
from hybrid.config.task_sections import METRICS, metric_name
from hybrid.errors import ConfigError
from hybrid.user_code.user_modules import describe_error, load_function

# Values by name; with several tasks, names begin with the name of the task.
Metrics: TypeAlias = Mapping[str, float]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class BinaryMetrics(NamedTuple):
    """Quality of predictions for N samples with labels 0 and 1.

    Sample weights are used as scikit-learn uses ``sample_weight``: all means and fractions are weighted.
    """

    auc: float  # area under the ROC curve; NaN if all labels are the same, or if a logit is NaN
    log_loss: float  # mean binary cross-entropy, in nats
    # Log loss divided by the entropy of the base rate (He et al. 2014): 1 for a constant prediction of the
    # base rate; NaN if all labels are the same.
    normalized_entropy: float
    calibration: float  # mean prediction divided by mean label; NaN if no label is 1
    accuracy: float  # fraction of samples on the right side of probability 0.5
    base_rate: float  # fraction of samples with label 1
    num_samples: int  # N, independent of weights


class Predictions(NamedTuple):
    """Predictions for N samples."""

    outputs: Tensor  # ``outputs_NO`` of the dense net, (N,) for one output
    labels: Tensor  # ``labels_NT``, (N,) for one task
    # int64, (N,): a hash of the features of each sample (hybrid.batch.Batch.feature_hashes).
    feature_hashes: Tensor
    # The weight of each sample for each task, float32, in the shape of ``labels``; None for equal weights.
    # Metrics exclude samples of weight 0.
    weights: Tensor | None = None
    groups: Tensor | None = None  # ``groups_N``; None without groups

    @classmethod
    def of(cls, batch: Batch, outputs_BO: Tensor, sequences: Sequence[int] = ()) -> Predictions:
        """Return the predictions for one batch. ``sequences`` are the indices of the sequence features."""
        return cls(outputs_BO, batch.labels, batch.feature_hashes(sequences), batch.weights, batch.groups)

    @classmethod
    def concatenate(cls, batches: Sequence[Predictions]) -> Predictions:
        columns = zip(*batches, strict=True)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def tie_equal_samples(self) -> Predictions:
        """Replace the outputs of samples with the same features by their mean; :meth:`metrics` calls this.

        The last bits of an output depend on the position of the sample in its batch. If these bits broke
        ties, the AUC would depend on the batch size and the number of trainers.
        """
        _, groups_N, sizes = self.feature_hashes.unique(return_inverse=True, return_counts=True)
        shape = (len(sizes), *self.outputs.shape[1:])
        sums = torch.zeros(shape, dtype=torch.float64).index_add_(0, groups_N, self.outputs.double())
        means = sums / sizes.view(-1, *[1] * (self.outputs.dim() - 1))
        return self._replace(outputs=means[groups_N].to(self.outputs.dtype))

    def metrics(self, tasks: Mapping[str, TaskSection], *, is_weighted: bool = False) -> dict[str, float]:
        """Return metrics by name (``TASK.METRIC`` for several tasks). ConfigError if a custom metric fails.

        Args:
            is_weighted: whether metrics use the weights of samples. Samples of weight 0 are always left out.
        """
        metrics: dict[str, float] = {}
        labels_NT = by_task(self.labels, len(tasks))
        weights_NT = None if self.weights is None else by_task(self.weights, len(tasks))
        outputs = split_outputs(
            self.tie_equal_samples().outputs, [task.num_outputs for task in tasks.values()]
        )
        for t, (name, outputs_N) in enumerate(zip(tasks, outputs, strict=True)):
            counts_N = slice(None) if weights_NT is None else weights_NT[:, t] > 0
            of_task = task_metrics(
                name,
                tasks[name],
                outputs_N[counts_N],
                labels_NT[counts_N, t],
                None if self.groups is None else self.groups[counts_N],
                weights_NT[counts_N, t] if is_weighted and weights_NT is not None else None,
            )
            metrics |= {metric_name(tasks, name, metric): value for metric, value in of_task.items()}
        return metrics


def task_metrics(
    name: str,
    task: TaskSection,
    outputs_N: Tensor,
    labels_N: Tensor,
    groups_N: Tensor | None,
    weights_N: Tensor | None = None,
) -> dict[str, float]:
    """Return all metrics of a task by name. Without samples, ``num_samples`` is 0, and the others are NaN.

    Args:
        name: the name of the task, for errors.
        outputs_N: outputs of the dense net; (N, C) for C classes. For a retrieval task, the rank of each
            sample's item among all items, from 0.
        groups_N: the group of each sample. Only ranking metrics of non-retrieval tasks need it.
        weights_N: weights above 0; None for equal weights. Ranking metrics and custom metrics ignore them.

    Raises:
        ConfigError: a custom metric cannot be imported, has other parameters, fails, or returns no number.
    """
    if not len(labels_N):
        return {**dict.fromkeys(task.metric_names, float("nan")), "num_samples": 0}
    metrics = _common_metrics(task, outputs_N, labels_N, weights_N)
    if task.kind == "retrieval":
        for metric in task.metrics:
            kind, _, k = metric.partition("@")
            gains_N = torch.ones_like(outputs_N) if kind == "recall" else 1 / (outputs_N + 2).log2()
            mean = gains_N.where(outputs_N < int(k), 0).double().mean().item()
            metrics[metric] = float("nan") if outputs_N.isnan().any() else mean
        return metrics
    predicted_N = compute_predictions(task, outputs_N)
    ranking = None
    for metric in task.metrics:
        if ":" in metric:
            function = _load_metric(name, metric)
            try:
                metrics[metric.rpartition(":")[2]] = float(function(predicted_N, labels_N))
            except Exception as error:  # user code may raise anything
                reason = f"fails, or returns no number: {describe_error(error)}"
                raise ConfigError(f"tasks.{name}.metrics", " ".join(reason.split()), metric) from error
            continue
        assert groups_N is not None, "the configuration requires data.group for ranking metrics"
        if predicted_N.isnan().any():
            metrics[metric] = float("nan")
            continue
        ranking = ranking or Ranking(predicted_N.numpy(), labels_N.double().numpy(), groups_N.numpy())
        kind, _, k = metric.partition("@")
        compute = getattr(ranking, kind)
        metrics[metric] = compute(int(k)) if k else compute()
    return metrics


def check_custom_metrics(tasks: Mapping[str, TaskSection]) -> None:
    """Import the custom metrics of all tasks; ConfigError if an import fails or a signature is wrong."""
    for name, task in tasks.items():
        for metric in task.metrics:
            if ":" in metric:
                _load_metric(name, metric)


def compute_predictions(task: TaskSection, outputs_N: Tensor) -> Tensor:
    """Convert the outputs of a task to predictions, in float64.

    Logits become probabilities: (N,), or (N, C) for C classes. For retrieval, outputs (N, 2 * D) become dot
    products of user and item vectors, (N,). For regression, the outputs are the predictions.
    """
    if task.kind == "binary":
        return probabilities(outputs_N)
    outputs_N = outputs_N.detach().double()
    if task.kind == "retrieval":
        users_ND, items_ND = outputs_N.chunk(2, dim=1)
        return (users_ND * items_ND).sum(dim=1)
    return outputs_N.softmax(dim=1) if task.kind == "classes" else outputs_N


def _common_metrics(
    task: TaskSection, outputs_N: Tensor, labels_N: Tensor, weights_N: Tensor | None
) -> dict[str, float]:
    if task.kind == "binary":
        return binary_metrics(outputs_N, labels_N, weights_N)._asdict()
    outputs_N, labels_N = outputs_N.detach().double(), labels_N.double()
    weights_N = torch.ones_like(labels_N) if weights_N is None else weights_N.double()
    if task.kind == "retrieval":  # outputs are ranks, from 0
        values: tuple[Tensor, ...] = (_mean(1 / (1 + outputs_N), weights_N),)
    elif task.kind == "regression":
        error_N = outputs_N - labels_N
        values = (_mean(error_N.square(), weights_N).sqrt(), _mean(error_N.abs(), weights_N))
    else:
        is_right_N = (outputs_N.argmax(dim=1) == labels_N).double()
        is_right_N[outputs_N.isnan().any(dim=1)] = torch.nan
        losses_N = F.cross_entropy(outputs_N, labels_N.long(), reduction="none")
        values = (_mean(is_right_N, weights_N), _mean(losses_N, weights_N))
    numbers = [value.item() for value in values]
    return dict(zip(METRICS[task.kind], [*numbers, len(labels_N)], strict=True))


def probabilities(logits_N: Tensor) -> Tensor:
    """Return the sigmoid of N logits, in float64 on the CPU. Equal logits have equal results."""
    # NumPy, because the last bits of torch's sigmoid depend on the position in a vector.
    with np.errstate(over="ignore"):
        return torch.from_numpy(1 / (1 + np.exp(-logits_N.detach().cpu().double().numpy())))


def binary_metrics(logits_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None) -> BinaryMetrics:
    """Compute the metrics of at least one sample, in float64. Labels are 0 or 1, and weights above 0."""
    logits_N, labels_N = logits_N.detach().double(), labels_N.detach().double()
    weights_N = torch.ones_like(logits_N) if weights_N is None else weights_N.double()
    probabilities_N = probabilities(logits_N)
    base_rate = _mean(labels_N, weights_N)
    # -log p = softplus(-logit) and -log(1 - p) = softplus(logit): finite where p rounds to 0 or 1.
    log_loss = _mean(F.softplus(logits_N) - labels_N * logits_N, weights_N)
    entropy = -(torch.xlogy(base_rate, base_rate) + torch.xlogy(1 - base_rate, 1 - base_rate))
    return BinaryMetrics(
        auc=_auc(probabilities_N, labels_N, weights_N),
        log_loss=log_loss.item(),
        normalized_entropy=(log_loss / entropy).item() if entropy > 0 else float("nan"),
        calibration=(_mean(probabilities_N, weights_N) / base_rate).item() if base_rate > 0 else float("nan"),
        accuracy=_mean(((logits_N > 0) == (labels_N > 0.5)).double(), weights_N).item(),
        base_rate=base_rate.item(),
        num_samples=logits_N.numel(),
    )


class ProgressiveMetrics:
    """Metrics of a binary task over any number of batches, in constant memory.

    For the AUC, logits in one range are ties. Ranges are 1/1024 wide, from -16 to 16; the outer two are open.

    Attributes:
        counts: int64 (2, 32768), numbers of samples by label (0, 1) and by range of logits.
        sums: float64 (3,), sums of log losses, of probabilities and of labels.
    """

    _RANGES, _PER_UNIT = 1 << 15, 1 << 10

    def __init__(self) -> None:
        self.counts = torch.zeros(2, self._RANGES, dtype=torch.int64)
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, logits_N: Tensor, labels_N: Tensor) -> None:
        """Add a batch on the CPU, with labels 0 and 1. Samples with label NaN are left out."""
        has_label_N = ~labels_N.isnan()
        logits_N, labels_N = logits_N[has_label_N].double(), labels_N[has_label_N].double()
        ranges_N = (logits_N.nan_to_num() * self._PER_UNIT).floor() + self._RANGES // 2
        cells_N = ranges_N.clamp(0, self._RANGES - 1).long() + self._RANGES * labels_N.long()
        self.counts += torch.bincount(cells_N, minlength=2 * self._RANGES).view(2, -1)
        log_losses_N = F.softplus(logits_N) - labels_N * logits_N
        self.sums += torch.stack([each.sum() for each in (log_losses_N, logits_N.sigmoid(), labels_N)])

    def metrics(self) -> dict[str, float]:
        """Return auc, log_loss and calibration, defined as in :class:`BinaryMetrics`, and num_samples."""
        negatives_R, positives_R = self.counts.double()
        below_R = negatives_R.cumsum(0) - negatives_R / 2
        pairs = negatives_R.sum() * positives_R.sum()
        num_samples = float(self.counts.sum())
        log_loss, probability, positives = self.sums.tolist()
        is_defined = pairs and not np.isnan(probability)  # NaN if a logit is NaN
        return {
            "auc": ((positives_R * below_R).sum() / pairs).item() if is_defined else float("nan"),
            "log_loss": log_loss / num_samples if num_samples else float("nan"),
            "calibration": probability / positives if positives else float("nan"),
            "num_samples": num_samples,
        }


def _mean(values_N: Tensor, weights_N: Tensor) -> Tensor:
    return (weights_N * values_N).sum() / weights_N.sum()


def _auc(scores_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> float:
    """Return the fraction of pairs (positive, negative) in which the positive sample has the higher score.

    A tie counts one half. The weight of a pair is the product of the weights of its samples.
    """
    if labels_N.min() == labels_N.max() or scores_N.isnan().any():
        return float("nan")
    is_positive_N = labels_N == 1
    positives_P = scores_N[is_positive_N]
    negatives_Q, order_Q = scores_N[~is_positive_N].sort()
    below_P = torch.searchsorted(negatives_Q, positives_P)
    not_above_P = torch.searchsorted(negatives_Q, positives_P, right=True)
    of_positives_P = weights_N[is_positive_N]
    # Sums of the weights of the first q negatives, for q = 0, 1, ...
    sums_Q = torch.cat([weights_N.new_zeros(1), weights_N[~is_positive_N][order_Q].cumsum(0)])
    won = (of_positives_P * (sums_Q[below_P] + sums_Q[not_above_P])).sum().item()
    return won / (2 * of_positives_P.sum() * sums_Q[-1]).item()


def _load_metric(name: str, metric: str) -> Callable[..., Any]:
    return load_function(f"tasks.{name}.metrics", metric, ("predictions", "labels"))


class Ranking:
    """N samples, ranked within their groups by descending score. Samples of equal scores form a tie.

    A metric is the mean over all orders of the samples in each tie, so it does not depend on the order of the
    input. Groups without a label above 0 are left out. GAUC also leaves out groups whose labels are all above
    0; recall leaves out groups whose labels have a sum of 0 or less. Without any group, a metric is NaN.

    Attributes:
        labels_N: the relevance of each sample, group by group, by descending scores.
        groups_N: index of the group of each sample.
        group_sizes_G: samples in each group.
        ranks_N: rank of each sample within its group, from 0.
        ties_N: index of the tie of each sample.
        tie_sizes_R, tie_labels_R: samples in each of the R ties, and the mean of their labels.
    """

    def __init__(self, scores_N: Floats, labels_N: Floats, groups_N: Integers) -> None:
        _, groups_N = np.unique(groups_N, return_inverse=True)
        order_N = np.lexsort((-scores_N, groups_N))
        scores_N, self.labels_N, self.groups_N = scores_N[order_N], labels_N[order_N], groups_N[order_N]
        self.group_sizes_G = np.bincount(groups_N)
        starts_G = np.cumsum(self.group_sizes_G) - self.group_sizes_G
        is_first_N = np.ones(len(order_N), np.bool_)
        is_first_N[1:] = (np.diff(self.groups_N) != 0) | (scores_N[1:] != scores_N[:-1])
        self._first_R = np.flatnonzero(is_first_N)
        self.ties_N = np.cumsum(is_first_N) - 1
        self.tie_sizes_R = np.bincount(self.ties_N)
        self.tie_labels_R = _sums(self.ties_N, self.labels_N) / self.tie_sizes_R
        self.ranks_N = np.arange(len(order_N)) - starts_G[self.groups_N]

    def gauc(self) -> float:
        """Return the size-weighted mean AUC of groups with both labels (Zhou et al. 2018, eq. 7), or NaN."""
        is_positive_N = self.labels_N > 0
        positives_G = _sums(self.groups_N, is_positive_N)
        pairs_G = positives_G * (self.group_sizes_G - positives_G)
        # The Mann-Whitney statistic from ranks: samples behind each positive, half of those in its tie.
        tie_ranks_N = self.ranks_N[self._first_R][self.ties_N]
        behind_N = self.group_sizes_G[self.groups_N] - tie_ranks_N - (self.tie_sizes_R[self.ties_N] + 1) / 2
        won_G = _sums(self.groups_N, np.where(is_positive_N, behind_N, 0))
        won_G -= positives_G * (positives_G - 1) / 2
        return _mean_ratio(won_G, pairs_G, self.group_sizes_G)

    def ndcg(self, k: int) -> float:
        """Return the mean over groups of the gain of the first ``k`` samples, divided by the largest gain.

        The gain is the sum of label / log2(1 + rank), with ranks from 1 (Järvelin and Kekäläinen 2002). The
        largest gain results if samples are sorted by label. The result is NaN if a label is negative.
        """
        if (self.labels_N < 0).any():
            return float("nan")
        discounts_N = np.where(self.ranks_N < k, 1 / np.log2(self.ranks_N + 2), 0)
        ideal_N = self.labels_N[np.lexsort((-self.labels_N, self.groups_N))]
        gains_G = _sums(self.groups_N, discounts_N * self.tie_labels_R[self.ties_N])
        return _mean_ratio(gains_G, _sums(self.groups_N, discounts_N * ideal_N))

    def recall(self, k: int) -> float:
        """Return the mean over groups of the sum of the first ``k`` labels, divided by the sum of all."""
        labels_N = self.tie_labels_R[self.ties_N]
        found_G = _sums(self.groups_N, np.where(self.ranks_N < k, labels_N, 0))
        return _mean_ratio(found_G, _sums(self.groups_N, self.labels_N))

    def mrr(self) -> float:
        """Return the mean over groups of 1 / r, where r >= 1 is the rank of the first label above 0."""
        relevant_R = _sums(self.ties_N, self.labels_N > 0).astype(np.int64)
        has_relevant = np.flatnonzero(relevant_R)
        if not len(has_relevant):
            return float("nan")
        _, firsts = np.unique(self.groups_N[self._first_R[has_relevant]], return_index=True)
        ties_G = has_relevant[firsts]
        ranks_G = self.ranks_N[self._first_R[ties_G]]
        cases_G3 = np.stack([ranks_G, self.tie_sizes_R[ties_G], relevant_R[ties_G]], axis=1)
        cases, counts = np.unique(cases_G3, axis=0, return_counts=True)
        return float(np.average([_mean_reciprocal_rank(*case) for case in cases.tolist()], weights=counts))


def _mean_reciprocal_rank(rank: int, size: int, num_relevant: int) -> float:
    """Return the mean of 1 / r over all orders of a tie; r >= 1 is the rank of its first relevant sample.

    Args:
        rank: rank of the first sample of the tie, from 0.
        size: number of samples in the tie.
        num_relevant: number of relevant samples in the tie, at least one.
    """
    ahead = np.arange(size - num_relevant + 1)  # how many samples of the tie precede the first relevant one
    is_irrelevant = 1 - num_relevant / (size - ahead)
    probabilities = np.cumprod([1.0, *is_irrelevant[:-1]]) * num_relevant / (size - ahead)
    return float((probabilities / (rank + ahead + 1)).sum())


def _mean_ratio(values_G: Floats, totals_G: Floats, weights_G: Integers | None = None) -> float:
    """Return the weighted mean of value / total over groups with a total above 0; NaN without such groups."""
    own_G = np.flatnonzero(totals_G > 0)
    if not len(own_G):
        return float("nan")
    weights = None if weights_G is None else weights_G[own_G]
    return float(np.average(values_G[own_G] / totals_G[own_G], weights=weights))


def _sums(groups_N: Integers, values_N: npt.NDArray[Any]) -> Floats:
    return np.bincount(groups_N, values_N).astype(np.float64)
