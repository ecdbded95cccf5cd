"""A split net of one rank: its parameters stay where they are, and gradients come back as plain tensors."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import ParallelStyle

from hybrid.dense.tensor_parallel import sharded_module
from hybrid.dense.tensor_parallel.sharded_module import (
    TensorParallel,
    flatten_tensor,
    sync_gradient,
    trainer_mesh,
    unflatten_tensor,
)
from hybrid.dense.tensor_parallel.sharding_plan import TensorStyle, automatic_plan
from hybrid.dense.tensor_parallel.shared_stage import SharedStage

pytestmark = pytest.mark.usefixtures("loopback")

NAMES = ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias", "1.weight", "1.bias"]


@pytest.fixture(scope="module")
def mesh(loopback: None) -> DeviceMesh:
    return trainer_mesh(1, "cpu")["tensor"]


def nested_net() -> nn.Sequential:
    """A pair of layers that the plan splits, and one that it leaves whole."""
    return nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), nn.Linear(3, 1))


def split_net(mesh: DeviceMesh, net: nn.Module | None = None) -> TensorParallel:
    net = nested_net() if net is None else net
    return TensorParallel(net, mesh, automatic_plan(net))


def values_and_layout(mesh: DeviceMesh) -> tuple[DTensor, DTensorSpec]:
    dtensor = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)], src_data_rank=None)
    _, layout = flatten_tensor(dtensor)
    assert layout is not None
    return dtensor, layout


def test_a_gradient_passes_one_hook_of_each_use_and_none_stays(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtensor, layout = values_and_layout(mesh)
    shard, _ = flatten_tensor(dtensor)
    synced: list[Tensor] = []

    def noted(gradient: Tensor) -> Tensor:
        synced.append(gradient)
        return sync_gradient(gradient)

    monkeypatch.setattr(sharded_module, "sync_gradient", noted)
    for _ in range(3):
        again = unflatten_tensor(shard, layout)
        assert (again.shape, again.placements) == ((4, 3), (Shard(0),))
        assert again.to_local().data_ptr() == shard.data_ptr()
        (gradient,) = torch.autograd.grad(again.full_tensor().square().sum(), [shard])
        assert type(gradient) is Tensor
        assert torch.equal(gradient, 2 * shard)
    assert len(synced) == 3
    assert not shard._backward_hooks


def test_parameters_become_plain_under_their_names(mesh: DeviceMesh) -> None:
    net = nested_net()
    kept, before = list(net[1].parameters()), {n: p.detach().clone() for n, p in net.named_parameters()}
    split = split_net(mesh, net)
    after = dict(split.module.named_parameters())
    assert list(after) == NAMES
    assert {type(parameter) for parameter in after.values()} == {nn.Parameter}
    torch.testing.assert_close({n: p.detach() for n, p in after.items()}, before, rtol=0, atol=0)
    assert [after["1.weight"], after["1.bias"]] == kept
    assert list(split.state_dict()) == [f"module.{name}" for name in NAMES]


def test_a_frozen_parameter_stays_frozen(mesh: DeviceMesh) -> None:
    net = nested_net()
    net[0][0].bias.requires_grad_(False)  # type: ignore[index]
    frozen = [name for name, p in split_net(mesh, net).module.named_parameters() if not p.requires_grad]
    assert frozen == ["0.0.bias"]


class Failing(nn.Module):
    def forward(self, hidden_BH: Tensor) -> Tensor:
        raise KeyError("no such luck")


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_dtensors_within_a_forward_pass_and_the_same_ones_after_it(
    fails: bool, mesh: DeviceMesh
) -> None:
    net = nested_net()
    seen: list[tuple[str, type]] = []
    split = split_net(mesh, nn.Sequential(net, Failing()) if fails else net)
    parameters = list(split.parameters())

    def note(module: nn.Module, inputs: object) -> None:
        seen.extend((name, type(parameter)) for name, parameter in net.named_parameters())

    net.register_forward_pre_hook(note)
    with pytest.raises(KeyError, match="no such luck") if fails else nullcontext():
        split(torch.ones(2, 4))
    assert seen == [(name, DTensor if name[0] == "0" else nn.Parameter) for name in NAMES]
    assert all(a is b for a, b in zip(split.parameters(), parameters, strict=True))
    for parameter in parameters:
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


def test_an_output_that_the_plan_leaves_split_is_gathered(mesh: DeviceMesh) -> None:
    layer, inputs_BX = nn.Linear(4, 6), torch.ones(2, 4)
    expected = layer(inputs_BX).detach()
    output = TensorParallel(layer, mesh, {"": TensorStyle.COLWISE.parallel_style()})(inputs_BX)
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output.detach(), expected)


def tied_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    ("make", "paths", "message"),
    [
        (nested_net, [], "the plan splits nothing"),
        (nested_net, ["1", "2", "0.5"], "the plan names 2, 0.5, but there are only 0, 0.0, 0.1, 0.2, 1$"),
        (tied_net, ["1"], "a parameter used in several places cannot be split: 0.weight, 1.weight"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    make: Callable[[], nn.Module], paths: list[str], message: str, mesh: DeviceMesh
) -> None:
    plan: dict[str, ParallelStyle] = {path: TensorStyle.COLWISE_GATHERED.parallel_style() for path in paths}
    net = make()
    parameters = list(net.parameters())
    with pytest.raises(ValueError, match=message):
        TensorParallel(net, mesh, plan)
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))


def test_a_shared_stage_of_one_rank_is_the_stage(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "all_gather_single")  # nothing to say to anybody
    net, inputs_BX = nested_net(), torch.ones(3, 4)
    stage = SharedStage(net, mesh.get_group())
    assert torch.equal(stage(inputs_BX), net(inputs_BX))
    assert dict(stage.named_parameters()).keys() == {f"stage.{name}" for name in NAMES}


@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity]
)
def test_a_pair_may_have_this_activation_between_it(activation: type[nn.Module], mesh: DeviceMesh) -> None:
    net = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 3))
    split = split_net(mesh, copy.deepcopy(net))
    assert [len(layout.placements) for layout in split.layouts.values()] == [1, 1, 1]
    inputs_BX = torch.randn(5, 4)
    for each in (net, split):
        each(inputs_BX).square().sum().backward()
    gradients = [parameter.grad for parameter in split.parameters()]
    torch.testing.assert_close(gradients, [parameter.grad for parameter in net.parameters()])
