"""What all trainers hold, on each of them; gradients find their way back to whose values they are of."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.engine.uneven_batches import gather_slices


def gather(values: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """All trainers' tensors, (N, ...), one after another; all of them call it at once.

    What requires gradients stays where it is, and gets the sum of those that all trainers have for it; all of
    them must then make it part of their loss. The rest comes to the CPU.

    Args:
        values: this trainer's, (n, ...); n may be another with each, and 0.
        device: where the group's collectives take tensors.
    """
    is_trained = torch.is_grad_enabled() and values.requires_grad
    if group.size() == 1:
        return values if is_trained else values.detach().cpu()
    if not is_trained:
        return _gathered(values.detach(), group, device)[0].cpu()
    whole: Tensor = _Gathered.apply(values, group, device)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    """Every trainer runs the same graph in the same order: this sum comes between the same two of DDP's
    everywhere."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
        ctx.group, ctx.device = group, device
        whole, ctx.start = _gathered(values, group, device)
        ctx.stop = ctx.start + len(values)
        return whole.to(values.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        summed = grads[0].to(ctx.device, copy=True).contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.start : ctx.stop].to(grads[0].device), None, None


def _gathered(values: Tensor, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, int]:
    """The whole, on ``device``, and where this trainer's part of it starts."""
    parts = gather_slices(values, group, device)
    return torch.cat(parts), sum(map(len, parts[: group.rank()]))
