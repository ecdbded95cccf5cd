"""Metrics against definitions written out sample by sample, and at the edges."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hybrid.metrics import BinaryMetrics, binary_metrics, probabilities


def _samples(seed: int = 0, size: int = 300) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_N = torch.randn(size, generator=generator).mul(2).round(decimals=1)  # with ties
    labels_N = (torch.rand(size, generator=generator) < logits_N.sigmoid()).float()
    return logits_N, labels_N


def _auc_by_pairs(logits_N: Tensor, labels_N: Tensor) -> float:
    """Share of (positive, negative) pairs in the right order; a tie counts one half."""
    positives = logits_N[labels_N == 1].tolist()
    negatives = logits_N[labels_N == 0].tolist()
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return float(wins) / (len(positives) * len(negatives))


def test_every_metric_equals_its_definition() -> None:
    logits_N, labels_N = _samples()
    found = binary_metrics(logits_N, labels_N)
    pairs = list(zip(logits_N.double().sigmoid().tolist(), labels_N.tolist(), strict=True))
    log_loss = -sum(math.log(p) if y else math.log1p(-p) for p, y in pairs) / len(pairs)
    rate = sum(y for _, y in pairs) / len(pairs)
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    expected = BinaryMetrics(
        auc=_auc_by_pairs(logits_N, labels_N),
        log_loss=log_loss,
        normalised_entropy=log_loss / entropy,
        calibration=sum(p for p, _ in pairs) / sum(y for _, y in pairs),
        accuracy=sum((p > 0.5) == (y == 1) for p, y in pairs) / len(pairs),
        base_rate=rate,
        num_samples=300,
    )
    assert found.as_dict() == pytest.approx(expected.as_dict(), rel=1e-6)
    assert found.log_loss == pytest.approx(log_loss, rel=1e-12)
    assert found.num_samples == 300


def test_large_logits_do_not_overflow() -> None:
    logits_N = torch.tensor([-1000.0, -900, 900, 1000])
    found = binary_metrics(logits_N, torch.tensor([1.0, 0, 0, 1]))
    assert found.log_loss == pytest.approx((1000 + 900) / 4)
    assert found.auc == 0.5


def test_auc_ranks_rounded_probabilities() -> None:
    wrong = binary_metrics(torch.tensor([20.0, 20.0 + 2**-18]), torch.tensor([1.0, 0.0]))
    assert wrong.auc == 0.0
    one = binary_metrics(torch.tensor([100.0, 200.0]), torch.tensor([1.0, 0.0]))  # both are 1.0
    assert one.auc == 0.5


@given(st.integers(1, 70), st.floats(-30, 30, width=32))
def test_probability_is_independent_of_the_position(size: int, logit: float) -> None:
    assert len(probabilities(torch.full((size,), logit)).unique()) == 1


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_single_class_has_no_auc(label: float) -> None:
    found = binary_metrics(torch.tensor([0.0, 2.0]), torch.full((2,), label))
    assert math.isnan(found.auc)
    assert math.isnan(found.normalised_entropy)
    assert math.isnan(found.calibration) == (label == 0)
    assert found.accuracy == 0.5
    assert math.isfinite(found.log_loss)


def test_nan_logit_gives_nan_metrics() -> None:
    found = binary_metrics(torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]))
    assert math.isnan(found.auc)
    assert math.isnan(found.log_loss)


def test_invalid_shapes_raise_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        binary_metrics(torch.empty(0), torch.empty(0))
    with pytest.raises(ValueError, match="one length"):
        binary_metrics(torch.zeros(3, 1), torch.zeros(3))


def test_integer_labels_and_logits_with_gradients_are_accepted() -> None:
    logits_N, labels_N = _samples()
    expected = binary_metrics(logits_N, labels_N)
    assert binary_metrics(logits_N.requires_grad_(), labels_N.long()) == expected


def test_auc_of_many_samples_is_exact() -> None:
    size = 200_000
    ranks_N = torch.randperm(size) + 1
    labels_N = (torch.rand(size) < ranks_N / size).float()
    positives = int(labels_N.sum())
    wins = int(ranks_N[labels_N == 1].sum()) - positives * (positives + 1) // 2  # Mann and Whitney 1947
    expected = wins / (positives * (size - positives))
    assert binary_metrics(ranks_N / size, labels_N).auc == expected
