"""Device lists, modules to replicate, and ways to call them."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.seeded import seeded
from torch import Tensor, nn

from hybrid.dense.data_parallel import DataParallel, data_parallel

CPUS = ["cpu", "cpu"]

# With one GPU, a GPU and the CPU stand for two GPUs.
PAIRS = [
    pytest.param(CPUS, id="cpu,cpu"),
    pytest.param(["cuda:0", "cpu"], marks=pytest.mark.gpu, id="cuda,cpu"),
    pytest.param(["cpu", "cuda:0"], marks=pytest.mark.gpu, id="cpu,cuda"),
]
DEVICES = [
    pytest.param(["cpu"], id="cpu"),
    pytest.param(CPUS, id="cpu,cpu"),
    pytest.param(["cpu", "cpu", "cpu"], id="cpu,cpu,cpu"),
    pytest.param(["cuda:0", "cpu"], marks=pytest.mark.gpu, id="cuda,cpu"),
    pytest.param(["cpu", "cuda:0"], marks=pytest.mark.gpu, id="cpu,cuda"),
]


def linear(device: str | int | torch.device = "cpu") -> nn.Linear:
    return seeded(lambda: nn.Linear(10, 5)).to(device)


def as_module(module: nn.Module, inputs: Any, devices: Any, kwargs: dict[str, Any] | None = None) -> Any:
    return DataParallel(module, devices)(*inputs, **(kwargs or {}))


def as_function(module: nn.Module, inputs: Any, devices: Any, kwargs: dict[str, Any] | None = None) -> Any:
    return data_parallel(module, inputs, devices, module_kwargs=kwargs)


CALLS = [as_module, as_function]


def gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def count_cycles(call: Callable[[], object]) -> int:
    """Return the number of objects that ``call`` leaves in reference cycles."""
    gc.freeze()
    gc.disable()
    try:
        call()
        return gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()


class Weighted(nn.Module):
    """Multiplies with a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScaleAndShift(nn.Module):
    """Two buffers, of which ``scale`` may require a gradient."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", scale.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Calls(nn.Module):
    """Calls a function with its submodules and the arguments."""

    def __init__(self, function: Callable[..., Any], *held: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ModuleList(held)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.held, *args, **kwargs)


def _fail(*_: object) -> None:
    raise KeyError("wonderful")


FAILING = Calls(_fail)
