"""The second look at a step: what of the net is the first that is not finite."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from hybrid.dense.step_diagnosis import NetInputs, first_not_finite
from hybrid.models.dense_net import Concatenation, DenseNet


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def net() -> DenseNet:
    head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    return DenseNet(nn.Linear(2, 3), Concatenation(), head)


def found(net: DenseNet, inputs: NetInputs | None = None, *, is_whole: bool = True) -> str:
    inputs = inputs or NetInputs(torch.ones(3, 2), torch.ones(3, 2), None)
    return first_not_finite(net, inputs, nullcontext(), is_whole=is_whole)


def test_finite_step_gives_no_text() -> None:
    assert found(net()) == ""


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            NetInputs(torch.full((3, 2), math.nan), torch.ones(3, 2), None),
            "the numeric columns of the batch are not",
        ),
        (
            NetInputs(torch.ones(3, 2), torch.full((3, 2), math.inf), None),
            "the vectors of the tables are not",
        ),
        (
            NetInputs(torch.ones(3, 2), torch.ones(3, 2), torch.full((3, 5), math.nan)),
            "the first that is not finite is the output of the remote net",
        ),
    ],
    ids=["batch", "tables", "remote net"],
)
def test_inputs_are_checked_first(inputs: NetInputs, said: str) -> None:
    assert found(net(), inputs).startswith(said)


def test_non_finite_parameter_is_named_with_its_layer() -> None:
    bad = net()
    with torch.no_grad():
        bad.get_parameter("head.2.bias").fill_(math.nan)
    assert found(bad) == (
        "the first that is not finite is the output of head.2, its parameter head.2.bias is not either"
    )
    assert found(bad, is_whole=False) == "the parameter head.2.bias is not finite"


def test_innermost_layer_is_named() -> None:
    bad = net()
    bad.interaction = _Rooted()
    with torch.no_grad():
        bad.get_parameter("bottom.weight").fill_(-1)
        bad.get_parameter("bottom.bias").zero_()
    assert found(bad) == (
        "the first that is not finite is the output of interaction.root, its parameters are finite"
    )


class _Rooted(Concatenation):
    def __init__(self) -> None:
        super().__init__()
        self.root = Root()

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        output: Tensor = self.root(super().forward(bottom_BH, pooled_BE))
        return output
