"""The loss of a step, and each ranking loss, equal their definitions, however samples are sliced."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hybrid
from hybrid.batch import Batch, SparseFeatures, by_task
from hybrid.config import TaskSection
from hybrid.engine.losses import Objective
from hybrid.engine.ranking_losses import RANKING
from hybrid.errors import ConfigError, DataError
from hybrid.primitives.grouping import ranking_totals
from hybrid.reference.reference_losses import ReferenceLoss

TASKS = {
    "click": TaskSection(loss="log_loss(pos_weight = 3, label_smoothing = 0.2)"),
    "stars": TaskSection(type="classes(3)", weight=0.5, loss="softmax(label_smoothing = 0.3)"),
    "spent": TaskSection(type="regression", loss="huber(0.7)"),
    "skip": TaskSection(loss="focal(1.5)", weight=2.0),
    "price": TaskSection(type="regression"),
}
RANKED = {
    "click": TaskSection(ranking_loss="pairwise(0.3)", weight=2.0),
    "stars": TaskSection(type="classes(3)", weight=0.5),
    "spent": TaskSection(type="regression", ranking_loss="pairwise(1.0)"),
    "skip": TaskSection(loss="focal(1.5)", ranking_loss="listwise"),
    "price": TaskSection(type="regression"),
}
GROUPS = torch.tensor([3] * 4 + [1] * 6 + [7] + [5] * 9 + [2] * 3)
SIZE = 23


def batch_of(labels: Tensor, weights: Tensor | None = None, totals: Tensor | None = None) -> Batch:
    sparse = SparseFeatures(torch.zeros(len(labels), dtype=torch.int64), None, None, 1)
    return Batch(
        torch.zeros(len(labels), 0), sparse, labels, len(labels), weights=weights, total_weights=totals
    )


def samples(has_weights: bool) -> tuple[Tensor, Batch]:
    """Outputs and labels of all tasks; every task leaves samples out, one all of them."""
    draw = torch.Generator().manual_seed(1)
    binary = torch.randint(0, 2, (SIZE, 2), generator=draw)
    labels = torch.stack(
        [
            binary[:, 0],
            torch.randint(0, 3, (SIZE,), generator=draw),
            torch.randn(SIZE, generator=draw),
            binary[:, 1],
            torch.randn(SIZE, generator=draw),
        ],
        dim=1,
    )
    weights = totals = None
    if has_weights:
        weights = torch.rand(labels.shape, generator=draw) * torch.randint(0, 2, labels.shape, generator=draw)
        weights[:, 4] = 0
        totals = weights.double().sum(0)
    outputs = torch.randn(SIZE, 7, generator=draw, dtype=torch.float64, requires_grad=True)
    return outputs, batch_of(labels, weights, totals)


def by_hand(outputs: Tensor, batch: Batch) -> Tensor:
    labels = batch.labels.double()
    click, skip = labels[:, 0], labels[:, 3]
    right = torch.where(skip == 1, outputs[:, 5], -outputs[:, 5]).sigmoid()
    error = (outputs[:, 4] - labels[:, 2]).abs()
    clicked = 0.8 * click + 0.1
    stars = 0.7 * F.one_hot(labels[:, 1].long(), 3).double() + 0.1
    values = [
        -(3 * clicked * outputs[:, 0].sigmoid().log() + (1 - clicked) * (1 - outputs[:, 0].sigmoid()).log()),
        -(stars * outputs[:, 1:4].softmax(1).log()).sum(1),
        torch.where(error < 0.7, error.square() / 2, 0.7 * (error - 0.35)),
        -((1 - right) ** 1.5) * right.log(),
        (outputs[:, 6] - labels[:, 4]).square(),
    ]
    weights = torch.ones_like(labels) if batch.weights is None else batch.weights.double()
    means = [(w * v).sum() / w.sum() for w, v in zip(weights.unbind(1), values, strict=True) if w.sum()]
    return torch.stack([task.weight * mean for task, mean in zip(TASKS.values(), means, strict=False)]).sum()


@pytest.mark.parametrize("has_weights", [False, True])
def test_loss_is_the_sum_of_weighted_means(has_weights: bool) -> None:
    outputs, batch = samples(has_weights)
    expected = by_hand(outputs, batch)
    for loss in (Objective(TASKS)(outputs, batch), *ReferenceLoss(TASKS).contributions([outputs], [batch])):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        found, wanted = (
            torch.autograd.grad(each, outputs, retain_graph=True)[0] for each in (loss, expected)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-15)


def ranked(has_weights: bool) -> tuple[Tensor, Batch]:
    outputs, batch = samples(has_weights)
    totals = ranking_totals(by_task(batch.labels, len(RANKED)), batch.weights, GROUPS)
    return outputs, batch._replace(groups=GROUPS, total_ranking_weights=totals)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 8, 30])
@pytest.mark.parametrize(("make", "tasks"), [(samples, TASKS), (ranked, RANKED)], ids=["means", "ranking"])
def test_losses_of_slices_add_up(
    make: Callable[[bool], tuple[Tensor, Batch]],
    tasks: dict[str, TaskSection],
    num_slices: int,
    has_weights: bool,
) -> None:
    outputs, batch = make(has_weights)
    expected = Objective(tasks)(outputs, batch)
    slices = batch.split(num_slices)
    assert num_slices < 30 or not all(len(each.labels) for each in slices)
    of_slices = outputs.split([len(each.labels) for each in slices])
    total = torch.stack([Objective(tasks)(*each) for each in zip(of_slices, slices, strict=True)]).sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(each, outputs, retain_graph=True)[0] for each in (total, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_of_certain_predictions_is_finite(gamma: float) -> None:
    outputs = torch.tensor([200.0, -200.0, 1.0], requires_grad=True)
    task = {"skip": TaskSection(loss=f"focal({gamma})")}
    loss = Objective(task)(outputs, batch_of(torch.tensor([1.0, 0.0, 1.0])))
    loss.backward()
    assert outputs.grad is not None
    assert math.isfinite(loss.item())
    assert outputs.grad.isfinite().all()


CUSTOM = """
def hinge(outputs, labels):
    return (1 - (2 * labels - 1) * outputs).clamp_min(0)

def summed(outputs, labels):
    return hinge(outputs, labels).sum()

def broken(outputs, labels):
    return outputs[99]
"""


@pytest.fixture
def custom_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_losses.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("custom_losses")
def test_custom_loss_is_called() -> None:
    task = {"click": TaskSection(loss="custom_losses:hinge")}
    outputs, labels = torch.tensor([0.5, -3.0]), torch.tensor([1.0, 1.0])
    assert Objective(task)(outputs, batch_of(labels)).item() == 2.25
    (part,) = ReferenceLoss(task).contributions([outputs.unsqueeze(1)], [batch_of(labels)])
    assert part.item() == 2.25


@pytest.mark.usefixtures("custom_losses")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("summed", r"'custom_losses:summed': .* \[2\], .* \[\]$"),
        ("broken", r"'custom_losses:broken': .*custom_losses\.py:9"),
        ("absent", r"'custom_losses:absent': .*AttributeError"),
    ],
)
def test_invalid_custom_loss_raises_an_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tasks\.click\.loss = {message}"):
        Objective({"click": TaskSection(loss=f"custom_losses:{name}")})


DTYPES = (torch.float32, torch.float64)


def graded_samples(graded: bool, has_weights: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
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
def test_ranking_loss_equals_the_reference(kind: str, graded: bool, has_weights: bool) -> None:
    scores, labels, groups, weights = graded_samples(graded, has_weights)
    task = {"t": TaskSection(type="regression", ranking_loss=f"{kind}(1.0)")}
    samples_N = batch_of(labels, weights)._replace(groups=groups)
    expected = ReferenceLoss(task).contributions([scores.unsqueeze(1)], [samples_N])[-1].item()
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
    scores, labels, groups, weights = graded_samples(True, True)
    losses = []
    for device in ("cpu", "cuda"):
        leaf = scores.float().to(device).requires_grad_()
        values, counts = RANKING[kind](leaf, labels, groups, weights)
        assert values.device.type == counts.device.type == device
        (gradient,) = torch.autograd.grad((values * counts).sum(), leaf)
        losses.append((values.cpu(), gradient.cpu()))
    assert all(map(torch.equal, *losses))
