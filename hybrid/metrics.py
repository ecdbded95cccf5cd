"""How good a model is: AUC, log loss, normalised entropy, calibration, accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid.batch import Batch


@dataclass(frozen=True, slots=True)
class Metrics:
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
        """Name to value, in the order above."""
        return dataclasses.asdict(self)


class Predictions(NamedTuple):
    """What a model makes of N samples.

    Attributes:
        logits: ``logits_N``.
        labels: ``labels_N``.
        rows: ``rows_N``, which samples are equal; see :meth:`hybrid.batch.Batch.row_keys`.
    """

    logits: Tensor
    labels: Tensor
    rows: Tensor

    @classmethod
    def of(cls, batch: Batch, logits_B: Tensor) -> Predictions:
        """Those of one batch."""
        return cls(logits_B, batch.labels, batch.row_keys())

    @classmethod
    def concatenate(cls, parts: Sequence[Predictions]) -> Predictions:
        """Those of several batches, one after the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def tied(self) -> Predictions:
        """The same, with one logit for all equal samples: the mean of theirs.

        A matrix product gives equal rows other last bits at other places of a batch. Left so, ties would
        break by them, and the AUC be another with another size of batches or number of trainers.
        """
        _, groups_N, sizes = self.rows.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, groups_N, self.logits.double())
        return self._replace(logits=(sums / sizes)[groups_N].to(self.logits.dtype))

    def metrics(self) -> Metrics:
        """How good they are, equal samples tied."""
        return binary_metrics(self.tied().logits, self.labels)


def probabilities(logits_N: Tensor) -> Tensor:
    """What N logits say, in float64: what is ranked for the AUC, and what ``hybrid predict`` writes."""
    # Of each logit once: torch's sigmoid has other last bits for the last elements of a vector.
    distinct_U, places_N = torch.unique(logits_N.detach().double(), return_inverse=True)
    return torch.sigmoid(distinct_U)[places_N]


def binary_metrics(logits_N: Tensor, labels_N: Tensor) -> Metrics:
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
    return Metrics(
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
