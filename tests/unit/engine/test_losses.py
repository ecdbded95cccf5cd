"""The loss of a step: what its parts add up to, however samples are shared, and what torch makes of it."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import RunConfig, TaskSection
from hybrid.engine.losses import Objective
from hybrid.errors import ConfigError
from hybrid.reference.reference_losses import ReferenceLoss

TASKS = {
    "click": TaskSection(),
    "stars": TaskSection(type="classes(3)", weight=0.5),
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
    values = [
        -(click * outputs[:, 0].sigmoid().log() + (1 - click) * (1 - outputs[:, 0].sigmoid()).log()),
        -outputs[:, 1:4].softmax(1).gather(1, labels[:, 1:2].long()).log().squeeze(1),
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
    for loss in (Objective(TASKS)(outputs, batch), *ReferenceLoss(TASKS).parts([outputs], [batch])):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        found, wanted = (
            torch.autograd.grad(each, outputs, retain_graph=True)[0] for each in (loss, expected)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("cuts", [(SIZE,), (10, 20, SIZE), (0, 5, 5, SIZE)])
def test_losses_of_uneven_slices_add_up(cuts: tuple[int, ...], has_weights: bool) -> None:
    outputs, batch = samples(has_weights)
    whole = Objective(TASKS)(outputs, batch)
    starts = (0, *cuts[:-1])
    parts = []
    for start, stop in zip(starts, cuts, strict=True):
        for micro in range(2):
            half = (start + stop) // 2
            mine = slice(start, half) if micro == 0 else slice(half, stop)
            weights = None if batch.weights is None else batch.weights[mine]
            share = batch_of(batch.labels[mine], weights, batch.total_weights)._replace(global_size=SIZE)
            parts.append(Objective(TASKS)(outputs[mine], share))
    total = torch.stack(parts).sum()
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(each, outputs, retain_graph=True)[0] for each in (total, whole))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def ranked(has_weights: bool) -> tuple[Tensor, Batch]:
    outputs, batch = samples(has_weights)
    batch = batch._replace(groups=GROUPS)
    return outputs, batch._replace(total_groups=batch.order_totals(len(RANKED)))


@pytest.mark.parametrize("has_weights", [False, True])
def test_ranking_losses_equal_the_reference(has_weights: bool) -> None:
    outputs, batch = ranked(has_weights)
    found = Objective(RANKED)(outputs, batch)
    expected = torch.stack(ReferenceLoss(RANKED).parts([outputs], [batch])).sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    of_found, of_expected = (torch.autograd.grad(loss, outputs)[0] for loss in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-11, atol=1e-15)
    plain = {name: dataclasses.replace(task, ranking_loss="") for name, task in RANKED.items()}
    assert abs(found - Objective(plain)(outputs, batch)).item() > 0.1
    # Of the whole batch by the reference, wherever a group's samples are: a split group would show.
    shares = batch._replace(total_groups=None).split(3)
    apart = outputs.split([len(share.labels) for share in shares])
    again = torch.stack(ReferenceLoss(RANKED).parts(apart, shares)).sum()
    torch.testing.assert_close(again, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_ranking_losses_of_slices_add_up(parts: int, has_weights: bool) -> None:
    outputs, batch = ranked(has_weights)
    whole = Objective(RANKED)(outputs, batch)
    shares = batch.split(parts)
    assert parts < 8 or not all(len(share.labels) for share in shares)
    apart = outputs.split([len(share.labels) for share in shares])
    total = torch.stack([Objective(RANKED)(*each) for each in zip(apart, shares, strict=True)]).sum()
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(each, outputs)[0] for each in (total, whole))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("size", [7, 8, 1000])
def test_unweighted_loss_has_the_bits_of_torch(size: int) -> None:
    labels = torch.randint(0, 2, (size,)).float()
    outputs = torch.randn(size, requires_grad=True)
    ours = Objective(RunConfig().all_tasks)(outputs, batch_of(labels))
    plain = F.binary_cross_entropy_with_logits(outputs, labels)
    assert torch.equal(ours, plain)
    gradients = [torch.autograd.grad(loss, outputs)[0] for loss in (ours, plain)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_of_certain_predictions_is_finite(gamma: float) -> None:
    outputs = torch.tensor([200.0, -200.0, 1.0], requires_grad=True)
    task = {"skip": TaskSection(loss=f"focal({gamma})")}
    loss = Objective(task)(outputs, batch_of(torch.tensor([1.0, 0.0, 1.0])))
    loss.backward()
    assert outputs.grad is not None
    assert math.isfinite(loss.item())
    assert outputs.grad.isfinite().all()


OWN = """
def hinge(outputs, labels):
    return (1 - (2 * labels - 1) * outputs).clamp_min(0)

def summed(outputs, labels):
    return hinge(outputs, labels).sum()

def broken(outputs, labels):
    return outputs[99]
"""


@pytest.fixture
def own_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_losses")
def test_custom_loss_is_called() -> None:
    task = {"click": TaskSection(loss="own_losses:hinge")}
    outputs, labels = torch.tensor([0.5, -3.0]), torch.tensor([1.0, 1.0])
    assert Objective(task)(outputs, batch_of(labels)).item() == 2.25
    (part,) = ReferenceLoss(task).parts([outputs.unsqueeze(1)], [batch_of(labels)])
    assert part.item() == 2.25


@pytest.mark.usefixtures("own_losses")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("summed", r"'own_losses:summed': must return one value per sample, \[2\], but returns \[\]$"),
        (
            "broken",
            r"'own_losses:broken': fails for two samples: .*own_losses.py:9, in broken: ",
        ),
        ("absent", r"'own_losses:absent': cannot be imported: AttributeError"),
    ],
)
def test_invalid_custom_loss_raises_an_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tasks\.click\.loss = {message}"):
        Objective({"click": TaskSection(loss=f"own_losses:{name}")})
