"""On which devices a data-parallel module computes, and which lists of them are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.replicas import CALLS, CPUS, NEEDS_CUDA, PAIRS, linear
from support.seeded import random
from torch import nn
from torch.testing import assert_close

from hybrid.dense.data_parallel.replicas import DataParallel, data_parallel


@pytest.mark.parametrize("devices", [*PAIRS, [torch.device("cpu"), -1]])
def test_may_be_strings_or_devices(devices: list[Any]) -> None:
    module, x = linear(devices[0]), random(20, 10).to(devices[0]).requires_grad_()
    forms = [devices, tuple(devices), [torch.device(d) if isinstance(d, str) else d for d in devices]]
    for form in forms:
        for output_device in (None, *form):
            output = data_parallel(module, x, form, output_device)
            wanted = torch.device("cpu" if output_device == -1 else output_device or devices[0])
            assert output.device == wanted
            assert_close(output, module(x), check_device=False)


@pytest.mark.gpu
@NEEDS_CUDA
def test_may_be_the_index_of_a_gpu() -> None:
    module, x = linear("cuda:0"), random(20, 10)
    for output_device, wanted in ((None, "cuda:0"), (0, "cuda:0"), (-1, "cpu"), ("cuda", "cuda:0")):
        output = data_parallel(module, x, [0, 0], output_device)
        assert output.device == torch.device(wanted)
        assert_close(output, module(x.cuda()), check_device=False)


@pytest.mark.parametrize("devices", [["cpu"], CPUS])
def test_the_output_may_be_elsewhere(devices: list[str]) -> None:
    assert DataParallel(linear(), devices, "meta")(random(2, 10)).device.type == "meta"
    assert data_parallel(linear(), random(2, 10), devices, "meta").device.type == "meta"


@pytest.mark.parametrize("device", ["cuda:64", 64])
def test_one_that_is_not_there_is_named(device: str | int) -> None:
    reason = rf"^there is no device cuda:64: this machine has {torch.cuda.device_count()} CUDA device\(s\)$"
    with pytest.raises(ValueError, match=reason):
        DataParallel(linear(), ["cpu", device])
    with pytest.raises(ValueError, match=reason):
        DataParallel(linear(), CPUS, output_device=device)


def test_there_must_be_one() -> None:
    with pytest.raises(ValueError, match="there must be a device"):
        DataParallel(linear(), [])


def refusal(device: str) -> str:
    return rf"^module must have its parameters and buffers on device {device} \(devices\[0\]\) but found"


# Each of torch's cases: the places of a layer, or in brackets of those of a Sequential, where it is moved to
# once it is wrapped, where its input is, and the devices; "H" is the host, "0" and "1" are GPUs. Of what is
# refused, the last is the place that must be apart from the others for that.
ALL = "01"  # what torch takes where none are named
ALLOWED = [
    ("0", None, "0", ALL),
    ("H", "0", "0", ALL),
    ("1", None, "1", "10"),
    ("H", "1", "1", "10"),
    ("[00]", None, "H", ALL),
    ("[00]", None, "H", "01"),
    ("[11]", None, "H", "10"),
]
REFUSED = [
    ("H", "H", ALL, "H"),
    ("1", "0", ALL, "1"),
    ("0", "0", "10", "1"),
    ("[H]", "H", ALL, "H"),
    ("[H]", "H", "01", "H"),
    ("[H]", "H", "10", "H"),
    ("[H0]", "H", ALL, "H"),
    ("[H0]", "H", "01", "H"),
    ("[H0]", "H", "10", "H"),
    ("[01]", "H", ALL, "1"),
    ("[01]", "H", "01", "1"),
    ("[01]", "H", "10", "1"),
    ("[00]", "H", "10", "1"),
    ("[HH]", "H", "10", "H"),
]


@dataclass(frozen=True)
class Machine:
    """What stands for torch's three places: as many devices, or two where only one place must be apart."""

    devices: tuple[str, ...]

    def places(self, apart: str) -> dict[str, str]:
        if len(self.devices) == 3:
            return dict(zip("H01", self.devices, strict=True))
        first, second = self.devices if apart == "H" else self.devices[::-1]
        return {place: first if place == apart else second for place in "H01"}


MACHINES = [
    pytest.param(Machine(("cpu", "meta")), id="cpu"),
    pytest.param(Machine(("cpu", "cuda:0")), marks=[pytest.mark.gpu, NEEDS_CUDA], id="gpu"),
    pytest.param(
        Machine(("cpu", "cuda:0", "cuda:1")),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
        ],
        id="gpus",
    ),
]


def module_on(notation: str, places: dict[str, str]) -> nn.Module:
    layers = [nn.Linear(2, 2).to(places[place]) for place in notation.strip("[]")]
    return nn.Sequential(*layers) if notation.startswith("[") else layers[0]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("module", "moved_to", "input_on", "on"), ALLOWED)
def test_a_module_may_be_on_the_first_one(
    module: str, moved_to: str | None, input_on: str, on: str, machine: Machine
) -> None:
    places = machine.places("H")
    devices, x = [places[place] for place in on], random(2, 2).to(places[input_on])
    inner = module_on(module, places)
    net = DataParallel(inner, devices)
    if moved_to is not None:
        net.to(places[moved_to])
    for output in (net(x), data_parallel(inner, x, devices)):
        assert output.device == torch.device(devices[0])
        assert output.shape == (2, 2)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("module", "input_on", "on", "apart"), REFUSED)
def test_a_module_must_be_on_the_first_one(
    module: str, input_on: str, on: str, apart: str, machine: Machine, call: Callable[..., Any]
) -> None:
    places = machine.places(apart)
    devices, x = [places[place] for place in on], random(2, 2).to(places[input_on])
    with pytest.raises(RuntimeError, match=refusal(devices[0])):
        call(module_on(module, places), (x,), devices)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "meta"], ["meta", "cpu"]])
def test_buffers_must_be_on_the_first_one_too(devices: list[str], call: Callable[..., Any]) -> None:
    elsewhere = "meta" if devices[0] == "cpu" else "cpu"
    module = nn.Sequential(nn.Linear(10, 5).to(devices[0]), nn.BatchNorm1d(5, affine=False).to(elsewhere))
    with pytest.raises(RuntimeError, match=refusal(devices[0])):
        call(module, (random(20, 10),), devices)
