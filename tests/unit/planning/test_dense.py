"""The arithmetic of dense nets, beside what paper and pencil say."""

import dataclasses
from typing import Any

import pytest
import torch

from hybrid.config import RunConfig
from hybrid.config.sections import NETS
from hybrid.input_spec import FeatureSpec, InputSpec
from workers.planning.dense_cost import dense_work

SPEC = InputSpec(("x", "y", "z"), tuple(FeatureSpec(f"c{k}", 10) for k in range(5)))
OWN_NET = """
from torch import Tensor, nn
from hybrid.models.dense_net import DenseNet

class Sum(nn.Module):
    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        return bottom_BH + pooled_BE

def build(config, input_spec, widths):
    head = nn.Sequential(nn.Linear(sum(widths), 1), nn.Flatten(0))
    return DenseNet(nn.Linear(len(input_spec.dense_features), sum(widths)), Sum(), head)
"""


def config(**dense: Any) -> RunConfig:
    return RunConfig().replace(dense=dataclasses.replace(RunConfig().dense, **dense))


def layer(inputs: int, outputs: int, passes: int = 3) -> int:
    """Forward, and backward to the weight and (if passes is 3) to the input."""
    return 2 * passes * inputs * outputs


def test_dlrm() -> None:
    work = dense_work(config(bottom_mlp=(7,), top_mlp=(11,)), SPEC, [4] * 5)
    dots = 2 * 2 * 6 * 6 * 4  # 6 vectors of 4: there, and back by one product
    bottom = layer(3, 7, passes=2) + layer(7, 4)
    top = layer(4 + 15, 11) + layer(11, 1)
    assert work.flops == bottom + dots + top
    assert work.parameters == (3 + 1) * 7 + (7 + 1) * 4 + (19 + 1) * 11 + 11 + 1


@pytest.mark.parametrize("net", [net for net in NETS if net != "dlrm"])
def test_every_net_is_counted_in_any_precision(net: str) -> None:
    double = config(net=net)
    double = double.replace(train=dataclasses.replace(double.train, dtype="float64"))
    work = dense_work(config(net=net), SPEC, [5] * 5)
    assert work.flops > 0
    assert dense_work(double, SPEC, [5] * 5) == work


def test_a_net_of_the_users_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_net.py").write_text(OWN_NET)
    monkeypatch.syspath_prepend(tmp_path)
    work = dense_work(config(net="planned_net:build"), SPEC, [4] * 5)
    assert work.flops == layer(3, 20, passes=2) + layer(20, 1)
    assert work.parameters == 4 * 20 + 21


def test_counting_leaves_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    dense_work(config(), SPEC, [4] * 5)
    assert torch.equal(torch.random.get_rng_state(), before)
