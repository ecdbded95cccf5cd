"""Replicas of TorchScript modules."""

# No postponed annotations here: TorchScript reads those of script methods, as types.

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.replicas import CPUS, PAIRS
from support.seeded import random, seeded
from torch import Tensor, nn
from torch.testing import assert_close

from hybrid.dense.data_parallel.replicas import DataParallel, replicate, shadow


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 2))


class ScriptBlock(torch.jit.ScriptModule):
    """A script module around another module."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.m = block

    @torch.jit.script_method  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.m(x)
        return output


def script_net() -> nn.Module:
    return ScriptBlock(layers())


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in replicas of eager modules too, which list no parameters."""
    return {
        f"{path}.{name}": tensor
        for path, submodule in module.named_modules(remove_duplicate=False)
        for held in (vars(submodule), submodule._parameters, submodule._buffers)
        for name, tensor in held.items()
        if isinstance(tensor, Tensor)
    }


def gradients(module: nn.Module, x: Tensor, source: nn.Module) -> list[Any]:
    """Of the parameters of ``source``, from a pass through ``module``."""
    return list(torch.autograd.grad(module(x).square().sum(), list(source.parameters())))


def check_replicas(module: nn.Module, replicas: list[Any], devices: list[str]) -> None:
    """Each replica lies on its device, computes what the module does, and has its gradients."""
    x = random(3, 2)
    for replica, device in zip(replicas, devices, strict=True):
        assert tensors_of(replica).keys() == tensors_of(module).keys()
        assert {tensor.device for tensor in tensors_of(replica).values()} == {torch.device(device)}
        assert_close(replica(x.to(device)), module(x.to(devices[0])), check_device=False)
        expected = gradients(module, x.to(devices[0]), module)
        assert_close(gradients(replica, x.to(device), module), expected)


@pytest.mark.parametrize("devices", PAIRS)
def test_a_script_module_inside_a_python_module_is_replicated(devices: list[str]) -> None:
    module = nn.Sequential(seeded(script_net)).to(devices[0])
    check_replicas(module, replicate(module, devices), devices)


@pytest.mark.parametrize("devices", PAIRS)
def test_a_script_module_in_two_places_is_replicated_once(devices: list[str]) -> None:
    shared = seeded(script_net)
    module = nn.Sequential(shared, ScriptBlock(shared)).to(devices[0])
    replicas: list[Any] = replicate(module, devices)
    check_replicas(module, replicas, devices)
    for replica in replicas:
        assert replica[0] is replica[1].m


@pytest.mark.parametrize("devices", PAIRS)
def test_a_traced_module_is_replicated(devices: list[str]) -> None:
    # Tracing warns of the check of the batch's size in training.
    net = seeded(lambda: nn.Sequential(nn.Sequential(layers()), layers())).to(devices[0]).eval()
    traced = torch.jit.trace(net, torch.ones(3, 2, device=devices[0]))
    check_replicas(traced, replicate(traced, devices), devices)


@pytest.mark.parametrize("devices", PAIRS)
def test_the_first_replica_alone_has_the_memory_of_the_module(devices: list[str]) -> None:
    module = nn.Sequential(ScriptBlock(seeded(script_net)), nn.Linear(2, 2)).to(devices[0])
    own = {name: tensor.data_ptr() for name, tensor in tensors_of(module).items()}
    first, second = (tensors_of(replica) for replica in replicate(module, devices))
    assert {name: tensor.data_ptr() for name, tensor in first.items()} == own
    assert not {tensor.data_ptr() for tensor in second.values()} & set(own.values())


@pytest.mark.parametrize("devices", PAIRS)
def test_the_first_replica_alone_sees_updates_in_place(devices: list[str]) -> None:
    module = nn.Sequential(seeded(script_net)).to(devices[0]).eval()
    first, second = replicate(module, devices)
    x = random(2, 2).to(devices[0])
    before = module(x)
    before.sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.data -= parameter.grad
        after = module(x)
        assert not torch.allclose(before, after)
        assert_close(first(x), after)
        assert_close(second(x.to(devices[1])), before.detach(), check_device=False)


def test_running_statistics_are_those_of_the_first_replica() -> None:
    module, plain, x = seeded(script_net), seeded(script_net), random(4, 2)
    DataParallel(module, CPUS)(x)
    plain(x[:2])
    assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


def test_settings_of_a_replica_are_its_own() -> None:
    module = seeded(script_net)
    replicate(module, CPUS)[0].eval()
    assert all(submodule.training for submodule in module.modules())


def test_several_threads_may_shadow_and_run_one_module() -> None:
    module, x = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))), random(4, 2)

    def times(factor: int) -> Tensor:
        output: Tensor = shadow(module, {p: p * factor for p in module.parameters()})(x)
        return output

    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(times, range(20)))
    assert_close(outputs, [times(factor) for factor in range(20)], rtol=0.0, atol=0.0)


def test_a_script_module_with_python_modules_in_it_is_refused() -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    module._modules._python_modules["python"] = nn.Linear(2, 2)
    reason = "^Cannot replicate network where python modules are children of ScriptModule$"
    with pytest.raises(RuntimeError, match=reason):
        replicate(nn.Sequential(module), CPUS)
