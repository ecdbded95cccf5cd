"""Nets of the user's own: built by their functions, and refused where they do not fit."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybrid.config import DenseSection, RunConfig
from hybrid.dense.custom_net import check_custom_net
from hybrid.dense.net_builder import build_dense_net, build_remote_net, extra_columns
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dcn_v2 import CrossInteraction
from hybrid.models.dense_net import DenseNet

OWN = """
import torch
from torch import nn
from hybrid.models.dense_net import DenseNet

class Join(nn.Module):
    def forward(self, bottom, pooled):
        return torch.cat([bottom, pooled], 1)

def linear(config, input_spec, widths):
    width = len(input_spec.dense_features) + sum(widths)
    last = config.dense.remote_mlp[-1] if config.dense.remote_mlp else width
    head = nn.Sequential(nn.Linear(last, 1), nn.Flatten(0))
    return DenseNet(nn.Identity(), Join(), head)

def wrong(config, input_spec, widths):
    return nn.Linear(1, 1)

def lazy(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.Sequential(nn.LazyLinear(1), nn.Flatten(0)))

def lazy_statistics(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.LazyBatchNorm1d(affine=False))

def elsewhere(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.Linear(14, 1, device="meta"))

def two_logits(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.Linear(14, 2))

def misfit(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.Sequential(nn.Linear(14, 8), nn.Linear(9, 1)))

class Pair(nn.Module):
    def forward(self, bottom):
        return bottom, bottom

def pair(config, input_spec, widths):
    return DenseNet(Pair(), Join(), nn.Linear(14, 1))

class NoEmpty(nn.Module):
    def forward(self, bottom, pooled):
        return torch.cat([bottom / bottom.max(), pooled], 1)

def no_empty(config, input_spec, widths):
    return DenseNet(nn.Identity(), NoEmpty(), nn.Linear(14, 1))

def short(config, input_spec):
    return None

flat = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets_of_a_test.py").write_text(OWN)
    (tmp_path / "broken_nets_of_a_test.py").write_text("def broken(:\n")
    monkeypatch.syspath_prepend(tmp_path)


def _own(name: str, **dense: Any) -> tuple[RunConfig, InputSpec, Sequence[int]]:
    """What a function is called with."""
    config = RunConfig(dense=dataclasses.replace(DenseSection(), net=name, **dense))
    sparse = tuple(FeatureSpec(f"C{k}", num_rows=10) for k in range(3))
    return config, InputSpec(("I0", "I1"), sparse), (3, 4, 5)


@pytest.mark.usefixtures("own_module")
def test_custom_net_is_built_by_its_function() -> None:
    arguments = _own("own_nets_of_a_test:linear")
    assert extra_columns("own_nets_of_a_test:linear") == 0
    net = build_dense_net(*arguments)
    assert isinstance(net, DenseNet)
    weight = next(net.parameters())
    assert weight.shape == (1, 14)
    torch.rand(1)
    assert torch.equal(next(build_dense_net(*arguments).parameters()), weight)
    remote_weight, _ = build_remote_net(*_own("own_nets_of_a_test:linear", remote_mlp=(7,))).parameters()
    assert remote_weight.shape == (7, 14)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent_nets_of_a_test:f", "cannot be imported: ModuleNotFoundError: No module named"),
        ("own_nets_of_a_test:absent", "cannot be imported: AttributeError: module .* has no attribute"),
        ("broken_nets_of_a_test:broken", "cannot be imported: \\S*broken_nets_of_a_test.py:1: SyntaxError"),
        ("own_nets_of_a_test:wrong", "must return a hybrid.models.dense_net.DenseNet, not a Linear"),
        ("own_nets_of_a_test:lazy", r"has head\.0\.weight without a size; give its lazy layer all sizes"),
        ("own_nets_of_a_test:lazy_statistics", r"has head\.running_mean without a size"),
        ("own_nets_of_a_test:elsewhere", r"has head\.weight on the device meta, without values"),
        (
            "own_nets_of_a_test:two_logits",
            r"the head returns \[2, 2\] for 2 samples, not \[2\] or \[2, 1\]: one logit per sample",
        ),
        (
            "own_nets_of_a_test:misfit",
            r"the head fails for inputs \[2, 14\]: RuntimeError: .*mat1 and mat2 shapes cannot be "
            r"multiplied \(2x8 and 9x1\); in head.1 of the net, Linear\(in_features=9, out_features=1, ",
        ),
        ("own_nets_of_a_test:pair", "the bottom returns a tuple, not a tensor"),
        (
            "own_nets_of_a_test:no_empty",
            r"the interaction fails for inputs \[0, 2\] and \[0, 12\]: \S*own_nets_of_a_test.py:\d+, "
            r"in forward: RuntimeError: .*; in interaction of the net, NoEmpty",
        ),
        (
            "own_nets_of_a_test:short",
            r"is called as short\(config, input_spec, widths\), and takes \(config, input_spec\) "
            r"\(own_nets_of_a_test.py:\d+\): too many positional arguments",
        ),
        ("own_nets_of_a_test:flat", "is not a function"),
    ],
)
def test_invalid_custom_net_raises_an_error(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        build_dense_net(*_own(name))
    assert caught.value.key == "dense.net"


def test_custom_net_with_too_few_outputs_raises_an_error() -> None:
    net = DenseNet(nn.Identity(), CrossInteraction(4, 1), nn.Linear(4, 1))
    check_custom_net(net, "m:net", [2, 2], torch.float32, num_outputs=1)
    with pytest.raises(
        ConfigError, match=r"the head returns \[2, 1\] for 2 samples, not \[2, 4\]: 4 outputs per"
    ):
        check_custom_net(net, "m:net", [2, 2], torch.float32, num_outputs=4)
