"""The forms in which a trainer computes its net: all give the same numbers, or are refused at once."""

from typing import Any

import pytest
import torch
from support.cluster import small_config
from support.seeded import random, seeded
from support.vectors import micro_batch
from torch import Tensor, nn

from hybrid.config import RunConfig
from hybrid.engine.dense_placement import DensePlacement
from hybrid.engine.execution_backends import apply_backend
from hybrid.engine.hybrid_model import HybridModel
from hybrid.engine.model_builder import Blueprint
from hybrid.engine.table_setup import table_specs
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet
from hybrid.primitives.step_timings import StepClock

pytestmark = pytest.mark.usefixtures("loopback")

SPEC = InputSpec(("x", "y"), (FeatureSpec("a", 5), FeatureSpec("b", 5)))
CPU = torch.device("cpu")
REPLICAS = {"device": "cpu,cpu,cpu"}
ALONE = {"tensor_size": 1}
FORMS: dict[str, dict[str, Any]] = {
    "replicas": REPLICAS,
    "tensor": ALONE,
    "script": {"compile": "script"},
    "trace": {"compile": "trace"},
    "aot_eager": {"compile": "aot_eager"},
    "script replicas": {**REPLICAS, "compile": "script"},
    "trace replicas": {**REPLICAS, "compile": "trace"},
}


class NeedsTwoRows(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1:
            raise ValueError("one row is not enough")
        return super().forward(inputs)


def config(form: dict[str, Any]) -> RunConfig:
    dense = {"device": "auto", **form}
    return small_config(
        cluster={"trainers": 1}, dense=dense, embedding={"dim": 3}, train={"dtype": "float64"}
    )


def dense_net(*between: nn.Module, bottom: nn.Module | None = None) -> DenseNet:
    bottom = bottom or seeded(lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU()))
    head = seeded(lambda: nn.Sequential(nn.Linear(10, 5), *between, nn.ReLU(), nn.Linear(5, 1)))
    return DenseNet(bottom, Concatenation(), head)


def arranged(form: dict[str, Any], net: DenseNet) -> tuple[HybridModel, DensePlacement]:
    model = HybridModel(net, dtype=torch.float64)
    configured = config(form)
    devices = [CPU] * len(form.get("device", "cpu").split(","))
    return model, apply_backend(model, Blueprint(configured, SPEC, table_specs(configured, SPEC)), devices)


def passed(model: HybridModel, pooled_BE: Tensor) -> list[Tensor]:
    """Logits of a pass, and the gradients of the vectors and of all parameters."""
    vectors = pooled_BE.clone().requires_grad_()
    logits_B = model(micro_batch(random(len(vectors), 2), vectors), StepClock())
    gradients = torch.autograd.grad(logits_B.square().sum(), [vectors, *model.net.parameters()])
    return [logits_B, *gradients]


# torch.compile looks at the gradients of whatever it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_output_and_the_gradients_of_the_plain_net(
    form: dict[str, Any],
) -> None:
    plain = HybridModel(dense_net(), dtype=torch.float64)
    model, _ = arranged(form, dense_net())
    assert model.net.state_dict().keys() == plain.net.state_dict().keys()
    assert model.training
    for size in (7, 2, 1, 0, 3):
        pooled_BE = random(size, 6, seed=size, dtype=torch.float64)
        for ours, expected in zip(passed(model, pooled_BE), passed(plain, pooled_BE), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_stage_that_does_nothing_stays(form: dict[str, Any]) -> None:
    nothing = nn.Identity()
    net = DenseNet(nothing, Concatenation(), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1)))
    model, _ = arranged(form, net)
    assert model.stages.bottom is nothing
    assert model.stages.head is not net.head


@pytest.mark.parametrize("form", [REPLICAS, ALONE, {"compile": "script"}])
def test_trying_a_form_leaves_running_statistics_alone(form: dict[str, Any]) -> None:
    net = dense_net(nn.BatchNorm1d(5))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    arranged(form, net)
    assert before.keys() >= {"head.1.running_mean", "head.1.running_var"}
    assert all(torch.equal(buffer, before[name].to(buffer)) for name, buffer in net.named_buffers())


class Unscriptable(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * {1: 2}.copy().popitem()[1]


REPLICA_FAILS = (
    "bottom of the net fails with this backend: ValueError: Caught ValueError in replica 0 on device"
)


@pytest.mark.parametrize(
    ("form", "net", "message"),
    [
        (REPLICAS, dense_net(bottom=NeedsTwoRows(2, 4)), f"device: {REPLICA_FAILS} cpu"),
        ({"compile": "script"}, dense_net(bottom=Unscriptable(2, 4)), "compile = 'script': "),
        (ALONE, dense_net(nn.Dropout(0.5)), r"tensor_size: takes no dropout \(head.1\)"),
        (
            ALONE,
            DenseNet(nn.Identity(), Concatenation(), nn.Linear(8, 1)),
            "tensor_size: .* has no layer to split",
        ),
    ],
)
def test_a_net_that_cannot_take_a_form_is_refused(form: dict[str, Any], net: DenseNet, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dense\.{message}") as caught:
        arranged(form, net)
    assert "\n" not in str(caught.value)
