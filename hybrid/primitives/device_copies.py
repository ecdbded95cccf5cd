"""Copies of tensors between the CPU and a GPU, asynchronous and with gradients.

::

    forward     CPU: tensor in pinned memory ──► GPU
    backward    GPU: gradient ──► pinned memory, and an event ──► CPU: wait for the event, use the gradient

Torch reuses a freed block of pinned memory only after the copies from and to it have ended.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of ``tensor`` on ``device``, or ``tensor`` itself if it is there already.

    Copies from the CPU to a GPU are asynchronous, so ``tensor`` must not change until the copy ends. The
    gradient is copied back asynchronously. The CPU waits for this copy before it uses the gradient.
    """
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    events: list[torch.Event] = []
    moved: Tensor = _Copy.apply(_AwaitGradient.apply(tensor, events), device, events)  # type: ignore[no-untyped-call]
    return moved


class _AwaitGradient(torch.autograd.Function):
    """The identity on the CPU. Its backward pass waits until the gradient has been copied to the CPU."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, events: list[torch.Event]) -> Tensor:
        ctx.events = events
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        for event in ctx.events:
            event.synchronize()
        return grads[0], None


class _Copy(torch.autograd.Function):
    """A copy to the GPU. Its backward pass starts to copy the gradient to the CPU, and does not wait."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, events: list[torch.Event]) -> Tensor:
        ctx.events = events
        return tensor.pin_memory().to(device, non_blocking=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].contiguous()
        on_cpu = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True).copy_(grad, non_blocking=True)
        event = torch.Event(grad.device)
        event.record()
        if torch.is_anomaly_enabled():  # autograd reads the gradient immediately
            event.synchronize()
        ctx.events.append(event)
        return on_cpu, None, None
