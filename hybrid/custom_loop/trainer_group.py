"""Collective operations among the trainers of a custom loop."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.custom_loop.global_batches import checksum
from hybrid.engine.uneven_batches import gather_slices
from hybrid.errors import DataError


class TrainerGroup:
    """All trainers; each of them calls the same methods in the same order.

    Args:
        group: process group of the trainers.
        device: device whose tensors the group's collectives take.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._size = group.size()
        self.device = device

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of all trainers' tensors."""
        total = values.detach().to(self.device, copy=True)
        if self._size > 1:
            dist.all_reduce(total, group=self._group)
        return total

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate all trainers' tensors, in the order of their ranks.

        A tensor that requires gradients stays on its device. Its gradient is the sum of the gradients that
        all trainers have for it, so each must use the result in its loss. Other tensors come to the CPU.

        Args:
            values: (n, ...); n may differ between trainers, and may be 0.
        """
        is_trained = torch.is_grad_enabled() and values.requires_grad
        if self._size == 1:
            return values if is_trained else values.detach().cpu()
        if not is_trained:
            return _all_gather(values.detach(), self._group, self.device)[0].cpu()
        apply: Any = _GatherWithGradients.apply
        gathered: Tensor = apply(values, self._group, self.device)
        return gathered

    def check_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches; compare the first one of all trainers.

        Raises:
            DataError: trainers read different batches.
        """
        for number, batch in enumerate(batches):
            if number == 0 and self._size > 1:
                own = torch.tensor([checksum(batch)], dtype=torch.int64, device=self.device)
                if bool((self.gather(own) != own.cpu()).any()):
                    raise DataError(
                        "trainers read different batches; each must read the same ones, of which it gets its "
                        "slice. Give the same seed to whatever shuffles or draws (torch's samplers have it)"
                    )
            yield batch


class _GatherWithGradients(torch.autograd.Function):
    """Gather with gradients. All trainers run the same graph in the same order, so that this all-reduce falls
    between the same two all-reduces of DDP on each."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
        ctx.group, ctx.device = group, device
        gathered, ctx.start = _all_gather(values, group, device)
        ctx.stop = ctx.start + len(values)
        return gathered.to(values.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].to(ctx.device, copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.start : ctx.stop].to(grads[0].device), None, None


def _all_gather(values: Tensor, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, int]:
    """Return all values, on ``device``, and the index of this trainer's first one."""
    parts = gather_slices(values, group, device)
    return torch.cat(parts), sum(map(len, parts[: group.rank()]))
