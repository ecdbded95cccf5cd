"""Ranking losses equal their definitions, sample by sample."""

import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

import hybrid
from hybrid.engine.ranking_losses import RANKING
from hybrid.errors import DataError

DTYPES = (torch.float32, torch.float64)


def naive(
    kind: str, scores: list[float], labels: list[float], groups: list[int], weights: list[float]
) -> float:
    """Compute the loss by its formulas in plain Python."""
    members = defaultdict(list)
    for i, group in enumerate(groups):
        if weights[i] > 0:
            members[group].append(i)
    total = over = 0.0
    for own in members.values():
        if len({labels[i] for i in own}) < 2:
            continue
        value = norm = 0.0
        if kind == "pairwise":
            for i in own:
                for j in own:
                    if labels[i] > labels[j]:
                        w = weights[i] * weights[j]
                        value, norm = value + w * math.log1p(math.exp(scores[j] - scores[i])), norm + w
        else:
            log_sum = math.log(sum(math.exp(scores[i]) for i in own))
            for i in own:
                value -= weights[i] * labels[i] * (scores[i] - log_sum)
                norm += weights[i] * labels[i]
        mean = sum(weights[i] for i in own) / len(own)
        total, over = total + mean * value / norm, over + mean
    return total / (over or 1.0)


def samples(graded: bool, has_weights: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return groups in random order: of one sample, of one label, with ties, and with weights of zero."""
    draw = torch.Generator().manual_seed(3)
    groups = torch.tensor([4] * 7 + [-2] * 5 + [9] + [1] * 3 + [6] * 2 + [8] * 4)
    labels = torch.randint(0, 4 if graded else 2, (len(groups),), generator=draw).float()
    labels[groups == 1] = 1.0
    weights = None
    if has_weights:
        weights = torch.rand(len(groups), generator=draw) * torch.randint(0, 2, labels.shape, generator=draw)
        weights[groups == 8] = 0.0
    scores = torch.randn(len(groups), generator=draw, dtype=torch.float64)
    scores[1] = scores[0]
    order = torch.randperm(len(groups), generator=draw)
    return scores[order], labels[order], groups[order], None if weights is None else weights[order]


def mean_of(
    kind: str, scores: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None
) -> Tensor:
    values, counts = RANKING[kind](scores, labels, groups, weights)
    assert values.shape == counts.shape == scores.shape
    assert values.dtype == counts.dtype == scores.dtype
    return (values * counts).sum() / (counts.sum().item() or 1.0)


@pytest.mark.parametrize("kind", RANKING)
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
def test_loss_equals_its_definition(kind: str, graded: bool, has_weights: bool) -> None:
    scores, labels, groups, weights = samples(graded, has_weights)
    weighed = [1.0] * len(labels) if weights is None else weights.tolist()
    expected = naive(kind, scores.tolist(), labels.tolist(), groups.tolist(), weighed)
    assert expected > 0.1
    for dtype in DTYPES:
        found = mean_of(kind, scores.to(dtype), labels, groups, weights).item()
        assert found == pytest.approx(expected, rel=1e-13 if dtype is torch.float64 else 1e-5)


@pytest.mark.parametrize("kind", RANKING)
def test_groups_without_pairs_add_nothing(kind: str) -> None:
    groups = torch.tensor([1, 1, 2, 3, 3])
    labels, weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    for size in (5, 0):
        scores = torch.randn(size, requires_grad=True)
        values, counts = RANKING[kind](scores, labels[:size], groups[:size], weights[:size])
        values.sum().backward()
        assert not values.any()
        assert not counts.any()
        assert scores.grad is not None
        assert not scores.grad.any()


@pytest.mark.parametrize("kind", RANKING)
def test_distant_scores_have_finite_losses(kind: str) -> None:
    scores = torch.tensor([-900.0, 900.0, 0.0, 30.0, -0.5], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    loss = mean_of(kind, scores, labels, torch.tensor([1, 1, 1, 2, 2]))
    loss.backward()
    first, second = (1800 + 900) / 2, math.log1p(math.exp(-30.5))  # the same for both kinds
    assert loss.item() == pytest.approx((first + second) / 2, rel=1e-12)
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_negative_label_of_a_listwise_loss_raises_an_error() -> None:
    with pytest.raises(DataError, match="label -2"):
        hybrid.listwise_loss(torch.zeros(2), torch.tensor([1.0, -2.0]), torch.tensor([1, 1]))
    values, _ = hybrid.pairwise_loss(torch.zeros(2), torch.tensor([1.0, -2.0]), torch.tensor([1, 1]))
    assert values.tolist() == [pytest.approx(math.log(2))] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RANKING)
def test_gpu_scores_give_the_same_bits(kind: str) -> None:
    scores, labels, groups, weights = samples(True, True)
    losses = []
    for device in ("cpu", "cuda"):
        leaf = scores.float().to(device).requires_grad_()
        values, counts = RANKING[kind](leaf, labels, groups, weights)
        assert values.device.type == counts.device.type == device
        (gradient,) = torch.autograd.grad((values * counts).sum(), leaf)
        losses.append((values.cpu(), gradient.cpu()))
    assert all(map(torch.equal, *losses))
