"""Device lists, modules to replicate, and ways to call them."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid.dense.replicas.replica import DataParallel, data_parallel

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# With one GPU, a GPU and the CPU stand for two GPUs.
PAIRS = [
    pytest.param(["cpu", "cpu"], id="cpu,cpu"),
    pytest.param(["cuda:0", "cpu"], marks=[pytest.mark.gpu, NEEDS_CUDA], id="cuda,cpu"),
    pytest.param(["cpu", "cuda:0"], marks=[pytest.mark.gpu, NEEDS_CUDA], id="cpu,cuda"),
]
DEVICES = [
    pytest.param(["cpu"], id="cpu"),
    pytest.param(["cpu", "cpu"], id="cpu,cpu"),
    pytest.param(["cpu", "cpu", "cpu"], id="cpu,cpu,cpu"),
    pytest.param(["cuda:0", "cpu"], marks=[pytest.mark.gpu, NEEDS_CUDA], id="cuda,cpu"),
    pytest.param(["cpu", "cuda:0"], marks=[pytest.mark.gpu, NEEDS_CUDA], id="cpu,cuda"),
]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed values, the same in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A module whose random weights are the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def linear(device: str | int | torch.device = "cpu") -> nn.Linear:
    module: nn.Linear = seeded(lambda: nn.Linear(10, 5))
    return module.to(device)


def as_module(module: nn.Module, inputs: Any, devices: Any, kwargs: dict[str, Any] | None = None) -> Any:
    return DataParallel(module, devices)(*inputs, **(kwargs or {}))


def as_function(module: nn.Module, inputs: Any, devices: Any, kwargs: dict[str, Any] | None = None) -> Any:
    return data_parallel(module, inputs, devices, module_kwargs=kwargs)


CALLS = [as_module, as_function]


def gradients(module: nn.Module) -> list[Tensor]:
    """Those of the parameters that have one."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def count_cycles(call: Callable[[], object]) -> int:
    """How many objects ``call`` leaves in cycles of references."""
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


class Recurrent(nn.Module):
    """A bidirectional LSTM; (N, L, inputs) gives (N, L, 2 x hidden), and its last states."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(inputs, hidden, num_layers=1, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        self.rnn.flatten_parameters()
        outputs: tuple[Tensor, tuple[Tensor, Tensor]] = self.rnn(x)
        return outputs


class Failing(nn.Module):
    def forward(self, *_: object) -> object:
        nothing: dict[str, object] = {}
        return nothing["wonderful"]


class ScaledProduct(nn.Module):
    def forward(self, a: Tensor, b: Tensor, scale: float, c: Tensor | None = None) -> Tensor:
        return scale * (a * b if c is None else a * b + c)


class Ones(nn.Module):
    """Takes no arguments."""

    def forward(self) -> Tensor:
        return torch.ones(2, 3)


class NotRecorded(nn.Module):
    """Passes on its input, and insists that autograd does not record."""

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "autograd records here"
        return x


class Calls(nn.Module):
    """Passes its arguments to a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def nested(t: Tensor) -> list[Any]:
    """An output of lists, tuples and a dict, of two keys."""
    return [t, (t.sin(), t.cos(), [t + 1]), t, OrderedDict(a=t, b=[t.sin()])]


class Keywords(nn.Module):
    """Takes its input as a keyword, within a dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: dict[str, Any]) -> Any:
        return self.inner(input["data"])


class ZeroesGradients(nn.Module):
    """Calls ``zero_grad`` on itself in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad()
        output: Tensor = self.layer(x)
        return output


class UnderAutocast(nn.Module):
    """A layer whose own forward pass runs in ``dtype``."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.autocast = device_type, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(*self.autocast):
            output: Tensor = self.layer(x)
        return output


class ComplexShift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 10, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class ConvNet(nn.Module):
    """Four 2 x 2 convolutions, each with weights of a type and memory format of its own."""

    def __init__(self, formats: Sequence[torch.memory_format], dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes
        widths = [(8, 16), (16, 32), (32, 16), (16, 8)]
        self.layers = nn.ModuleList(
            nn.Conv2d(*width, 2, dtype=dtype) for width, dtype in zip(widths, dtypes, strict=True)
        )
        for layer, memory_format in zip(self.layers, formats, strict=True):
            layer.to(memory_format=memory_format)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = layer(x.to(dtype))
        return x


class Checked(nn.Module):
    """Holds parameters in a list or dict, and lets ``check`` look at them in its forward pass."""

    def __init__(self, parameters: nn.ParameterList | nn.ParameterDict, check: Callable[[Any], None]) -> None:
        super().__init__()
        self.held = parameters
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        self.check(self.held)
        return x
