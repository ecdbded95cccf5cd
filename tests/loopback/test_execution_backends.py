"""Execution backends of a net give the same numbers, or raise an error at the start."""

from typing import Any

import pytest
import torch
from support.cluster import small_config
from support.seeded import random, seeded
from support.vectors import micro_batch
from torch import Tensor, nn

from hybrid.engine.execution_backends import apply_backend
from hybrid.engine.hybrid_model import HybridModel
from hybrid.engine.model_builder import Blueprint, table_specs
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet
from hybrid.primitives.step_timings import StepClock

pytestmark = pytest.mark.usefixtures("loopback")

SPEC = InputSpec(("x", "y"), (FeatureSpec("a", 5), FeatureSpec("b", 5)))
CPU = torch.device("cpu")
REPLICAS = {"device": "cpu,cpu,cpu"}
ALONE = {"tensor_size": 1}
COMPILED = {"compile": "aot_eager"}
BACKENDS: dict[str, dict[str, Any]] = {"replicas": REPLICAS, "tensor": ALONE, "compiled": COMPILED}


def tied_layers() -> nn.Sequential:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.Linear(8, 1))


class NeedsTwoRows(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1:
            raise ValueError("one row is not enough")
        return super().forward(inputs)


def dense_net(*between: nn.Module, bottom: nn.Module | None = None) -> DenseNet:
    bottom = bottom or seeded(lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU()))
    head = seeded(lambda: nn.Sequential(nn.Linear(10, 5), *between, nn.ReLU(), nn.Linear(5, 1)))
    return DenseNet(bottom, Concatenation(), head)


def make_model(dense: dict[str, Any], net: DenseNet) -> HybridModel:
    model = HybridModel(net, dtype=torch.float64)
    config = small_config(
        cluster={"trainers": 1},
        dense={"device": "auto", **dense},
        embedding={"dim": 3},
        train={"dtype": "float64"},
    )
    devices = [CPU] * len(dense.get("device", "cpu").split(","))
    apply_backend(model, Blueprint(config, SPEC, table_specs(config, SPEC)), devices)
    return model


def run(model: HybridModel, pooled_BE: Tensor) -> list[Tensor]:
    """Return the logits of a pass, and the gradients of the vectors and of all parameters."""
    vectors = pooled_BE.clone().requires_grad_()
    logits_B = model(micro_batch(random(len(vectors), 2), vectors), StepClock())
    gradients = torch.autograd.grad(logits_B.square().sum(), [vectors, *model.net.parameters()])
    return [logits_B, *gradients]


# torch.compile looks at the gradients of whatever it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("dense", BACKENDS.values(), ids=BACKENDS)
def test_every_backend_equals_the_plain_net(dense: dict[str, Any]) -> None:
    norms = (nn.BatchNorm1d(5), nn.BatchNorm1d(5)) if dense is COMPILED else ()
    plain = HybridModel(dense_net(*norms[:1]), dtype=torch.float64)
    model = make_model(dense, dense_net(*norms[1:]))
    before, after = (dict(each.net.state_dict()) for each in (plain, model))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert model.training
    assert model.is_whole == (dense is not ALONE)
    # torch.compile compiles for batches of 1 and of 0 anew, which test_compilation.py shows.
    for size in (7, 2) if dense is COMPILED else (7, 1, 0):
        pooled_BE = random(size, 6, seed=size, dtype=torch.float64)
        for ours, expected in zip(run(model, pooled_BE), run(plain, pooled_BE), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dense", [REPLICAS, ALONE, pytest.param(COMPILED, marks=pytest.mark.long)])
def test_identity_stage_stays(dense: dict[str, Any]) -> None:
    identity = nn.Identity()
    net = DenseNet(identity, Concatenation(), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1)))
    model = make_model(dense, net)
    assert model.stages.bottom is identity
    assert model.stages.head is not net.head


@pytest.mark.parametrize("dense", [REPLICAS, ALONE])  # above, COMPILED has them
def test_trial_of_a_backend_keeps_running_statistics(dense: dict[str, Any]) -> None:
    net = dense_net(nn.BatchNorm1d(5))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    make_model(dense, net)
    assert before.keys() >= {"head.1.running_mean", "head.1.running_var"}
    assert all(torch.equal(buffer, before[name].to(buffer)) for name, buffer in net.named_buffers())


class FailsInTraining(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            raise ValueError("not in training")
        return super().forward(inputs)


REPLICA_FAILS = (
    "bottom of the net fails with this backend: ValueError: Caught ValueError in replica 0 on device"
)


@pytest.mark.parametrize(
    ("dense", "net", "message"),
    [
        (REPLICAS, dense_net(bottom=NeedsTwoRows(2, 4)), f"device: {REPLICA_FAILS} cpu"),
        (COMPILED, dense_net(bottom=FailsInTraining(2, 4)), "compile = 'aot_eager': "),
        (ALONE, dense_net(nn.Dropout(0.5)), r"tensor_size: takes no dropout \(head.1\)"),
        (
            ALONE,
            DenseNet(nn.Identity(), Concatenation(), nn.Linear(8, 1)),
            "tensor_size: .* has no layer to split",
        ),
        (
            ALONE,
            DenseNet(nn.Identity(), Concatenation(), tied_layers()),
            r"tensor_size: cannot split head of the net: .*: 0\.weight, 2\.weight; leave",
        ),
    ],
)
def test_unsupported_net_raises_an_error(dense: dict[str, Any], net: DenseNet, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dense\.{message}") as caught:
        make_model(dense, net)
    assert "\n" not in str(caught.value)
