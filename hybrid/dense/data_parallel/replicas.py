"""Replicas of a module that compute concurrently, one per device.

A call of :class:`DataParallel`::

    inputs ── scatter ───► a slice for each device ───┐
                                                       parallel_apply ── gather ──► outputs
    module ── replicate ─► a replica for each device ─┘

``torch.nn.parallel`` supports accelerators only. Here a list of devices may mix CUDA devices and CPUs, and
contain a device twice.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.parameter import is_lazy

from hybrid.dense.data_parallel.parallel_apply import parallel_apply
from hybrid.dense.data_parallel.scatter_gather import Device, gather, resolve_device, scatter, scatter_kwargs
from hybrid.dense.parameter_substitution import shadow

__all__ = [
    "DataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "shadow",
]

M = TypeVar("M", bound=nn.Module)


def replicate(module: M, devices: Sequence[Device], detach: bool = False) -> list[M]:
    """Create a replica of ``module`` for each device; see :func:`shadow`.

    Replica 0 shares the memory of parameters and buffers that are on its device, so that its in-place changes
    reach ``module``. Everything else is copied. Gradients of the replicas are summed in the order of
    ``devices``. A backward pass that reaches any parameter gives the others zero gradients.

    Args:
        devices: may be empty, and may contain a device twice.
        detach: whether to detach the replicas from ``module`` for autograd.

    Raises:
        RuntimeError: a parameter has no shape yet, or :func:`shadow` does not support the module.
    """
    tensors = list(chain(module.parameters(), module.buffers()))
    if any(is_lazy(tensor) for tensor in tensors):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    targets = [resolve_device(device) for device in devices]
    tracked = [tensor for tensor in tensors if tensor.requires_grad and not detach]
    constant = [tensor for tensor in tensors if detach or not tensor.requires_grad]
    # One function for all tensors, so that unused parameters get a gradient too.
    copies = _Broadcast.apply(targets, *tracked) if tracked else ()  # type: ignore[no-untyped-call]
    constant_copies = _copies(constant, targets)
    return [
        shadow(
            module,
            dict(zip(tracked, copies[index :: len(targets)], strict=True))
            | dict(zip(constant, constant_copies[index :: len(targets)], strict=True)),
        )
        for index in range(len(targets))
    ]


def _copies(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> tuple[Tensor, ...]:
    """Return copies of the first tensor for all devices, then of the next; the first may be an alias."""
    return tuple(
        tensor.detach().to(device, copy=index > 0)
        for tensor in tensors
        for index, device in enumerate(devices)
    )


class _Broadcast(torch.autograd.Function):
    """Copies of all tensors; the backward pass sums the gradients of the copies."""

    @staticmethod
    def forward(ctx: FunctionCtx, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # dense zeros would make a sparse gradient dense
        # Only for the shapes of gradients, since values may change before the backward pass.
        ctx.originals = [tensor.detach() for tensor in tensors]  # type: ignore[attr-defined]
        return _copies(tensors, devices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num_copies = len(grads) // len(ctx.originals)
        of_tensors = [grads[start : start + num_copies] for start in range(0, len(grads), num_copies)]
        sums = []
        for original, of_tensor in zip(ctx.originals, of_tensors, strict=True):
            received = [grad.to(original.device) for grad in of_tensor if grad is not None]
            sums.append(reduce(_add, received) if received else torch.zeros_like(original))
        return None, *sums


def _add(total: Tensor, grad: Tensor) -> Tensor:
    # torch can add a sparse tensor to a dense one, but not the other way round.
    return grad + total if total.is_sparse and not grad.is_sparse else total + grad


class DataParallel(nn.Module):
    """Calls ``module`` with a slice of every batch on each of several devices, in one process.

    Tensors among the arguments are split along ``dim``, also in containers. Other arguments go to every
    device. A batch with fewer samples than devices uses fewer devices; an empty batch and a call without
    arguments use one.

    Each call creates replicas, which run in their own threads. The module must therefore make no remote
    calls, and attributes that its forward pass assigns are lost. In-place changes of buffers on the first
    device stay. On CPUs, replicas draw random numbers from one generator in an unspecified order.

    Args:
        module: has its parameters and buffers on ``devices[0]``.
        devices: None means all CUDA devices, or the CPU if there are none.
        output_device: the device of the outputs; None means ``devices[0]``.
        dim: the dimension of samples in inputs and outputs.

    Raises:
        ValueError: there are no devices, or this machine does not have one of them.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.module = module
        if devices is None:
            devices = range(torch.cuda.device_count()) or ["cpu"]
        if not devices:
            raise ValueError("there must be a device to compute on")
        self.devices = [resolve_device(device) for device in devices]
        self.output_device = self.devices[0] if output_device is None else resolve_device(output_device)
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the output for the whole batch; scalar outputs become a vector with one value per device.

        Raises:
            RuntimeError: a parameter or buffer is not on ``devices[0]``.
        """
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != self.devices[0]:
                raise RuntimeError(
                    f"module must have its parameters and buffers on device {self.devices[0]} (devices[0]) "
                    f"but found one of them on device: {tensor.device}"
                )
        args, keywords = scatter_kwargs(inputs, kwargs, self.devices, self.dim)
        if not args:
            args, keywords = ((),), ({},)
        if len(self.devices) == 1:
            outputs = [self.module(*args[0], **keywords[0])]
            if self.output_device == self.devices[0]:
                return outputs[0]
        else:
            used = self.devices[: len(args)]
            outputs = parallel_apply(replicate(self.module, used), args, keywords, used)
        return gather(outputs, self.output_device, self.dim)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call ``module`` once like :class:`DataParallel`.

    Args:
        inputs: a tuple of positional arguments, or a single argument; None means none.
        module_kwargs: keyword arguments.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    return DataParallel(module, devices, output_device, dim)(*inputs, **(module_kwargs or {}))
