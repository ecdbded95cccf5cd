"""Diagnosis of a step: the first non-finite value of its last forward pass."""

import math
import re
from collections.abc import Mapping

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


def net(values: Mapping[str, float] = {}, interaction: nn.Module | None = None) -> DenseNet:
    """Return a net, with the same value in all of some parameters."""
    head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    made = DenseNet(nn.Linear(2, 3), interaction or Concatenation(), head)
    with torch.no_grad():
        for name, value in values.items():
            made.get_parameter(name).fill_(value)
    return made


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
        assert model.first_not_finite() == ""


@pytest.mark.parametrize(
    ("net", "inputs", "place"),
    [
        (net(), {"dense_BF": math.nan * FINITE}, "numeric columns"),
        (net(), {"pooled_BE": math.inf * FINITE}, "vectors"),
        (net(), {"remote_BH": torch.full((3, 5), math.nan)}, "remote net"),
        (net({"head.2.bias": math.nan}), {}, r"output of head\.2 .* parameter head\.2\.bias$"),
        (net({"bottom.weight": -1, "bottom.bias": 0}, Root()), {}, r"output of interaction\.root$"),
        (net({"head.0.weight": 10}), {"remote_BH": torch.full((3, 5), 3e38)}, r"output of head\.0$"),
    ],
)
def test_first_non_finite_value_is_named(net: DenseNet, inputs: dict[str, Tensor], place: str) -> None:
    """Inputs come before layers, and inner layers before outer ones."""
    assert re.search(place, run(net, **inputs).first_not_finite())


def test_without_the_pass_a_parameter_is_named() -> None:
    model = run(net({"head.2.bias": math.nan}))
    model.is_whole = False  # as with tensor parallelism
    assert re.search(r"are in the parameter head\.2\.bias$", model.first_not_finite())
