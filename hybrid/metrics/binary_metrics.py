"""Metrics of probabilities: AUC, log loss, normalized entropy, calibration, accuracy.

Weights of samples have the meaning of scikit-learn's ``sample_weight``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class BinaryMetrics:
    """Quality of predictions for N samples with labels 0 and 1.

    Attributes:
        auc: area under the ROC curve; NaN if all labels are the same, or a logit is NaN.
        log_loss: mean binary cross-entropy, in nats.
        normalised_entropy: log loss divided by the entropy of the base rate (He et al. 2014): 1 for a
            constant prediction of the base rate; NaN if all labels are the same.
        calibration: mean prediction divided by mean label; NaN if no label is 1.
        accuracy: fraction of samples on the right side of probability 0.5.
        base_rate: fraction of samples with label 1.
        num_samples: N, independent of weights.
    """

    auc: float
    log_loss: float
    normalised_entropy: float
    calibration: float
    accuracy: float
    base_rate: float
    num_samples: int

    def as_dict(self) -> dict[str, float]:
        """Return the values by name, in the order of ``hybrid.config.task_sections.METRICS``."""
        return dataclasses.asdict(self)


def probabilities(logits_N: Tensor) -> Tensor:
    """Return the probabilities of N logits in float64, for the AUC and ``hybrid predict``."""
    # By NumPy, since the last bits of torch's sigmoid depend on the position in a vector.
    with np.errstate(over="ignore"):
        return torch.from_numpy(1 / (1 + np.exp(-logits_N.detach().cpu().double().numpy())))


def binary_metrics(logits_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None) -> BinaryMetrics:
    """Compute the metrics of N logits and N labels of 0 and 1 in float64.

    Args:
        weights_N: weights above 0; None for equal weights.

    Raises:
        ValueError: there are no samples, or the two differ in shape.
    """
    if logits_N.shape != labels_N.shape or logits_N.dim() != 1:
        shapes = f"logits {tuple(logits_N.shape)} and labels {tuple(labels_N.shape)}"
        raise ValueError(f"{shapes} are not two vectors of one length")
    if logits_N.numel() == 0:
        raise ValueError("there are no samples to compute metrics of")
    logits_N, labels_N = logits_N.detach().double(), labels_N.detach().double()
    weights_N = None if weights_N is None else weights_N.double()
    probabilities_N = probabilities(logits_N)
    base_rate = mean(labels_N, weights_N)
    # -log p = softplus(-logit) and -log(1 - p) = softplus(logit): finite where p rounds to 0 or 1.
    log_loss = mean(F.softplus(logits_N) - labels_N * logits_N, weights_N)
    entropy = -(torch.xlogy(base_rate, base_rate) + torch.xlogy(1 - base_rate, 1 - base_rate))
    return BinaryMetrics(
        auc=_auc(probabilities_N, labels_N, weights_N),
        log_loss=log_loss.item(),
        normalised_entropy=(log_loss / entropy).item() if entropy > 0 else float("nan"),
        calibration=(mean(probabilities_N, weights_N) / base_rate).item() if base_rate > 0 else float("nan"),
        accuracy=mean(((logits_N > 0) == (labels_N > 0.5)).double(), weights_N).item(),
        base_rate=base_rate.item(),
        num_samples=logits_N.numel(),
    )


def mean(values_N: Tensor, weights_N: Tensor | None) -> Tensor:
    """Of all values, or by their weights, both in float64."""
    return values_N.mean() if weights_N is None else (weights_N * values_N).sum() / weights_N.sum()


def _auc(scores_N: Tensor, labels_N: Tensor, weights_N: Tensor | None) -> float:
    """The fraction of pairs of a positive and a negative sample in the right order; ties count one half.

    A pair weighs the product of its samples' weights.
    """
    if labels_N.min() == labels_N.max() or scores_N.isnan().any():
        return float("nan")
    is_positive_N = labels_N == 1
    positives_P, (negatives_Q, order_Q) = scores_N[is_positive_N], scores_N[~is_positive_N].sort()
    below_P = torch.searchsorted(negatives_Q, positives_P)
    not_above_P = torch.searchsorted(negatives_Q, positives_P, right=True)
    if weights_N is None:
        won = (below_P.sum() + not_above_P.sum()).item()
        return won / (2 * positives_P.numel() * negatives_Q.numel())
    of_positives_P = weights_N[is_positive_N]
    # Of the first q negatives, from q = 0 on.
    sums_Q = torch.cat([weights_N.new_zeros(1), weights_N[~is_positive_N][order_Q].cumsum(0)])
    won = (of_positives_P * (sums_Q[below_P] + sums_Q[not_above_P])).sum().item()
    return won / (2 * of_positives_P.sum() * sums_Q[-1]).item()
