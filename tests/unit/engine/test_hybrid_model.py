"""Diagnosis of a step: the first non-finite value of its last forward pass."""

import math

import pytest
import torch
from support.vectors import micro_batch
from torch import Tensor, nn

from hybrid.engine.hybrid_model import HybridModel
from hybrid.models.dense_net import Concatenation, DenseNet
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.ticket import Ticket

FINITE = torch.ones(3, 2)


class Root(Concatenation):
    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Threshold(0.0, math.inf)

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        output: Tensor = self.root(super().forward(bottom_BH, pooled_BE))
        return output


def net(interaction: nn.Module | None = None) -> DenseNet:
    head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    return DenseNet(nn.Linear(2, 3), interaction or Concatenation(), head)


def run(
    net: DenseNet, dense_BF: Tensor = FINITE, pooled_BE: Tensor = FINITE, remote_BH: Tensor | None = None
) -> HybridModel:
    def remote_net(ticket: Ticket, hidden_BH: Tensor) -> Tensor:
        assert remote_BH is not None
        return remote_BH

    model = HybridModel(net, None if remote_BH is None else remote_net)
    model(micro_batch(dense_BF, pooled_BE), StepClock())
    return model


def test_finite_step_gives_no_text() -> None:
    for model in (run(net()), run(net(), remote_BH=torch.ones(3, 5))):
        assert model.first_not_finite(is_whole=True) == ""


@pytest.mark.parametrize(
    ("inputs", "clause"),
    [
        ({"dense_BF": math.nan * FINITE}, "the numeric columns of the batch are not finite"),
        ({"pooled_BE": math.inf * FINITE}, "the vectors of the tables are not finite"),
        ({"remote_BH": torch.full((3, 5), math.nan)}, "the output of the remote net is not finite"),
    ],
)
def test_inputs_are_checked_first(inputs: dict[str, Tensor], clause: str) -> None:
    assert run(net(), **inputs).first_not_finite(is_whole=True) == clause


def test_non_finite_parameter_is_named_with_its_layer() -> None:
    bad = net()
    with torch.no_grad():
        bad.get_parameter("head.2.bias").fill_(math.nan)
    model, first = run(bad), "the first values that are not finite are in the "
    assert (
        model.first_not_finite(is_whole=True) == f"{first}output of head.2 and in the parameter head.2.bias"
    )
    assert model.first_not_finite(is_whole=False) == f"{first}parameter head.2.bias"


def test_innermost_layer_is_named() -> None:
    bad = net(Root())
    with torch.no_grad():
        bad.get_parameter("bottom.weight").fill_(-1)
        bad.get_parameter("bottom.bias").zero_()
    clause = "the first values that are not finite are in the output of interaction.root"
    assert run(bad).first_not_finite(is_whole=True) == clause


def test_head_is_repeated_with_the_output_of_the_remote_net() -> None:
    bad = net()
    with torch.no_grad():
        bad.get_parameter("head.0.weight").fill_(10.0)
    clause = "the first values that are not finite are in the output of head.0"
    assert run(bad, remote_BH=torch.full((3, 5), 3e38)).first_not_finite(is_whole=True) == clause
