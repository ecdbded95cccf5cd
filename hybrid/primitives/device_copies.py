"""Copies of tensors between the CPU and a GPU, asynchronous and with gradients.

::

    CPU    tensor ── pinned ──┐                                    ┌── await the event ──► gradient
    GPU                       └──► copy ──► ... ──► gradient ── copy to pinned memory, event

Torch keeps pinned memory that is freed, and gives it to later calls once the copies have ended.
"""

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU or of ``device`` on ``device``.

    The copy to a GPU, and that of the gradient back, are asynchronous, from and to pinned memory, which torch
    caches. Only what reads the gradient waits for it, while the GPU goes on with the backward pass.
    """
    if tensor.device == device:
        return tensor
    copies: list[torch.Event] = []
    moved: Tensor = _Copy.apply(_AwaitGradient.apply(tensor, copies), device, copies)  # type: ignore[no-untyped-call]
    return moved


class _AwaitGradient(torch.autograd.Function):
    """The identity; autograd runs its backward pass in a thread of the CPU, not of the GPU."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copies: list[torch.Event]) -> Tensor:
        ctx.copies = copies
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        for each in ctx.copies:
            each.synchronize()
        return grads[0], None


class _Copy(torch.autograd.Function):
    """A copy to the GPU; its backward pass starts the copy of the gradient, and does not wait."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, copies: list[torch.Event]) -> Tensor:
        ctx.copies = copies
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].contiguous()
        on_cpu = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True).copy_(grad, non_blocking=True)
        copied = torch.Event(grad.device)
        copied.record()
        ctx.copies.append(copied)
        return on_cpu, None, None
