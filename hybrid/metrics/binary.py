"""Metrics of probabilities: AUC, log loss, normalised entropy, calibration, accuracy."""

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
        auc: area under the ROC curve; NaN where all labels are the same, or a logit is NaN.
        log_loss: mean binary cross-entropy, in nats.
        normalised_entropy: log loss over the entropy of the base rate, so that 1 is what always
            predicting the base rate scores (He et al. 2014); NaN where all labels are the same.
        calibration: mean prediction over mean label; NaN where no label is 1.
        accuracy: share of samples on the right side of probability 0.5.
        base_rate: share of samples with label 1.
        num_samples: N.
    """

    auc: float
    log_loss: float
    normalised_entropy: float
    calibration: float
    accuracy: float
    base_rate: float
    num_samples: int

    def as_dict(self) -> dict[str, float]:
        """Name to value, in the order above, which is that of ``hybrid.config.tasks.METRICS``."""
        return dataclasses.asdict(self)


def probabilities(logits_N: Tensor) -> Tensor:
    """What N logits say, in float64: what is ranked for the AUC, and what ``hybrid predict`` writes."""
    # NumPy's, since torch's sigmoid has other last bits for the last elements of a vector.
    with np.errstate(over="ignore"):
        return torch.from_numpy(1 / (1 + np.exp(-logits_N.detach().cpu().double().numpy())))


def binary_metrics(logits_N: Tensor, labels_N: Tensor) -> BinaryMetrics:
    """Metrics of N logits against N labels of 0 and 1, computed in float64.

    Raises:
        ValueError: there are no samples, or the two differ in shape.
    """
    if logits_N.shape != labels_N.shape or logits_N.dim() != 1:
        shapes = f"logits {tuple(logits_N.shape)} and labels {tuple(labels_N.shape)}"
        raise ValueError(f"{shapes} are not two vectors of one length")
    if logits_N.numel() == 0:
        raise ValueError("there are no samples to compute metrics of")
    logits_N, labels_N = logits_N.detach().double(), labels_N.detach().double()
    probabilities_N = probabilities(logits_N)
    base_rate = labels_N.mean()
    # -log p = softplus(-logit) and -log(1 - p) = softplus(logit): finite where p rounds to 0 or 1.
    log_loss = (F.softplus(logits_N) - labels_N * logits_N).mean()
    entropy = -(torch.xlogy(base_rate, base_rate) + torch.xlogy(1 - base_rate, 1 - base_rate))
    return BinaryMetrics(
        auc=_auc(probabilities_N, labels_N),
        log_loss=log_loss.item(),
        normalised_entropy=(log_loss / entropy).item() if entropy > 0 else float("nan"),
        calibration=(probabilities_N.mean() / base_rate).item() if base_rate > 0 else float("nan"),
        accuracy=((logits_N > 0) == (labels_N > 0.5)).double().mean().item(),
        base_rate=base_rate.item(),
        num_samples=logits_N.numel(),
    )


def _auc(scores_N: Tensor, labels_N: Tensor) -> float:
    """The share of pairs of a positive and a negative sample in the right order; ties count one half."""
    if labels_N.min() == labels_N.max() or scores_N.isnan().any():
        return float("nan")
    is_positive_N = labels_N == 1
    positives_P, negatives_Q = scores_N[is_positive_N], scores_N[~is_positive_N].sort().values
    won = torch.searchsorted(negatives_Q, positives_P).sum()
    won_or_tied = torch.searchsorted(negatives_Q, positives_P, right=True).sum()
    return (won + won_or_tied).item() / (2 * positives_P.numel() * negatives_Q.numel())
