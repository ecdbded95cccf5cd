"""A net split over one rank: parameters keep their names, and gradients are plain tensors."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hybrid.dense import tensor_parallel
from hybrid.dense.tensor_parallel import (
    STYLES,
    TensorParallel,
    automatic_plan,
    flatten_tensor,
    sync_gradient,
    trainer_mesh,
    unflatten_tensor,
)

pytestmark = pytest.mark.usefixtures("loopback")

NAMES = ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias", "1.weight", "1.bias"]


@pytest.fixture(scope="module")
def mesh(loopback: None) -> DeviceMesh:
    return trainer_mesh(1, "cpu")["tensor"]


def nested_net() -> nn.Sequential:
    """Return a pair of layers that the plan splits, and a layer that it does not split."""
    return nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), nn.Linear(3, 1))


def split_net(mesh: DeviceMesh, net: nn.Module) -> TensorParallel:
    return TensorParallel(net, mesh, automatic_plan(net))


def test_each_use_of_a_shard_has_one_gradient_hook(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    dtensor = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)], src_data_rank=None)
    shard, layout = flatten_tensor(dtensor)
    assert layout is not None
    gradients: list[Tensor] = []

    def record(gradient: Tensor) -> Tensor:
        gradients.append(gradient)
        return sync_gradient(gradient)

    monkeypatch.setattr(tensor_parallel, "sync_gradient", record)
    for _ in range(3):
        again = unflatten_tensor(shard, layout)
        assert (again.shape, again.placements) == ((4, 3), (Shard(0),))
        assert again.to_local().data_ptr() == shard.data_ptr()
        (gradient,) = torch.autograd.grad(again.full_tensor().square().sum(), [shard])
        assert type(gradient) is Tensor
        assert torch.equal(gradient, 2 * shard)
    assert len(gradients) == 3
    assert not shard._backward_hooks


def test_parameters_are_plain_under_their_names(mesh: DeviceMesh) -> None:
    net = nested_net()
    net[0][0].bias.requires_grad_(False)  # type: ignore[index]
    unsplit, before = list(net[1].parameters()), {n: p.detach().clone() for n, p in net.named_parameters()}
    split = split_net(mesh, net)
    after = dict(split.module.named_parameters())
    assert list(after) == NAMES
    assert {type(parameter) for parameter in after.values()} == {nn.Parameter}
    torch.testing.assert_close({n: p.detach() for n, p in after.items()}, before, rtol=0, atol=0)
    assert [after["1.weight"], after["1.bias"]] == unsplit
    assert list(split.state_dict()) == [f"module.{name}" for name in NAMES]
    assert [name for name, parameter in after.items() if not parameter.requires_grad] == ["0.0.bias"]


class Failing(nn.Module):
    def forward(self, hidden_BH: Tensor) -> Tensor:
        raise KeyError("no such key")


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_dtensors_only_within_the_forward_pass(fails: bool, mesh: DeviceMesh) -> None:
    net = nested_net()
    types: dict[str, type] = {}
    split = split_net(mesh, nn.Sequential(net, Failing()) if fails else net)
    parameters = list(split.parameters())

    def record(module: nn.Module, inputs: object) -> None:
        types.update((name, type(parameter)) for name, parameter in net.named_parameters())

    net.register_forward_pre_hook(record)
    with pytest.raises(KeyError, match="no such key") if fails else nullcontext():
        split(torch.ones(2, 4))
    assert types == {name: DTensor if name.startswith("0.") else nn.Parameter for name in NAMES}
    assert all(a is b for a, b in zip(split.parameters(), parameters, strict=True))
    for parameter in parameters:
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


def test_split_output_is_gathered(mesh: DeviceMesh) -> None:
    layer, inputs_BX = nn.Linear(4, 6), torch.ones(2, 4)
    expected = layer(inputs_BX).detach()
    output = TensorParallel(layer, mesh, {"": STYLES["colwise"]()})(inputs_BX)
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output.detach(), expected)


def test_plan_of_a_tied_parameter_raises_an_error(mesh: DeviceMesh) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    parameters = list(net.parameters())
    with pytest.raises(ValueError, match=r"cannot be split: 0.weight, 1.weight"):
        TensorParallel(net, mesh, {"1": STYLES["colwise_gathered"]()})
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))


@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity]
)
def test_pair_with_an_activation_equals_the_net(activation: type[nn.Module], mesh: DeviceMesh) -> None:
    net = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 3))
    split = split_net(mesh, copy.deepcopy(net))
    assert [len(layout.placements) for layout in split.layouts.values()] == [1, 1, 1]
    inputs_BX = torch.randn(5, 4)
    for each in (net, split):
        each(inputs_BX).square().sum().backward()
    gradients = [parameter.grad for parameter in split.parameters()]
    torch.testing.assert_close(gradients, [parameter.grad for parameter in net.parameters()])
