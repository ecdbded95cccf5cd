"""ESMM against its equations in probabilities, and at logits where these are 0 and 1."""

import math

import pytest
import torch
from torch import Tensor
from unit.models.equations import Parameters, check_model, plain_logit, vectors

from hybrid.models.esmm import ESMM, both_log_probabilities, entire_space_loss

CLICKED = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]).double()
CONVERTED = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]).double()


def plain(parameters: Parameters, inputs: Tensor) -> tuple[Tensor, Tensor]:
    click, conversion = (
        torch.stack([plain_logit(parameters, name, x) for x in inputs]) for name in ("click", "conversion")
    )
    return click, conversion


def plain_loss(click: Tensor, conversion: Tensor, clicked: Tensor, converted: Tensor) -> Tensor:
    losses = []
    for b in range(len(click)):
        p, q = 1 / (1 + torch.exp(-click[b])), 1 / (1 + torch.exp(-conversion[b]))
        of_click = -torch.log(p if clicked[b] else 1 - p)
        losses.append(of_click - torch.log(p * q if converted[b] else 1 - p * q))
    return torch.stack(losses)


def test_towers_take_the_same_inputs() -> None:
    check_model(ESMM(4, hidden=(5, 3)), plain, vectors(6, 4, seed=1))


def test_loss_covers_clicks_and_conversions() -> None:
    check_model(
        torch.nn.Module(),
        lambda _, *given: plain_loss(*given),
        *(vectors(6, seed=1), vectors(6, seed=2), CLICKED, CONVERTED),
        run=entire_space_loss,
    )


@pytest.mark.parametrize(
    ("click", "conversion", "log_both", "log_not_both"),
    [
        (50.0, 50.0, -2 * math.exp(-50), math.log(2) - 50),
        (-800.0, 3.0, -800 - math.log1p(math.exp(-3)), 0.0),
        (800.0, -800.0, -800.0, 0.0),
        (800.0, 900.0, 0.0, -800.0),
    ],
)
def test_probabilities_that_are_nearly_0_and_1_keep_their_logarithms(
    click: float, conversion: float, log_both: float, log_not_both: float
) -> None:
    logits = torch.tensor([click, conversion], dtype=torch.float64, requires_grad=True)
    found = both_log_probabilities(logits[0], logits[1])
    assert [each.item() for each in found] == pytest.approx([log_both, log_not_both], rel=1e-14, abs=1e-300)
    sum(found).backward()  # type: ignore[union-attr]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
