"""Collective operations on tensors whose number of rows differs between the processes of a group."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# From the rows of one rank to those of all ranks, or back.
_Exchange: TypeAlias = Callable[[Tensor], Tensor]


def gather_rows(local_bX: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, in rank order. Rank ``i`` passes ``rows[i]`` rows as ``local_bX``."""
    longest = max(rows)
    padded_bX = local_bX.contiguous()  # as NCCL requires
    if len(local_bX) < longest:  # collectives need tensors of one size
        padded_bX = local_bX.new_zeros(longest, *local_bX.shape[1:])
        padded_bX[: len(local_bX)] = local_bX
    all_BX = local_bX.new_empty(len(rows) * longest, *local_bX.shape[1:])
    dist.all_gather_single(all_BX, padded_bX, group=group)
    if min(rows) == longest:
        return all_BX
    return torch.cat([rank_bX[:size] for rank_bX, size in zip(all_BX.split(longest), rows, strict=True)])


def gather_with_gradients(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the concatenated ``values`` of all trainers, in rank order, on the device of ``values``.

    All trainers must call this together. Their numbers of rows may differ, and may be 0. The backward pass
    sums the gradients of the result over all trainers, so every trainer must use the result in its loss.
    """
    if group.size() == 1:
        return values
    of_ranks = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_single(of_ranks, torch.tensor([len(values)]), group=group)
    sizes = of_ranks.tolist()
    all_values = gather_rows(values.detach().cpu(), sizes, group).to(values.device)

    def sum_gradients(grad: Tensor) -> Tensor:
        # All trainers run the same graph in the same order, so this all-reduce has the same position among
        # those of DDP on every trainer.
        total = grad.to("cpu", copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        of_trainers: tuple[Tensor, ...] = total.to(grad.device).split(sizes)
        return of_trainers[group.rank()]

    gathered: Tensor = ExchangeRows.apply(values, None, lambda _: all_values, sum_gradients)  # type: ignore[no-untyped-call]
    return gathered


class ExchangeRows(torch.autograd.Function):
    """Computes ``exchange(rows_BX)``, such as a gather; its backward pass computes ``inverse(gradient)``.

    The result requires a gradient if ``rows_BX`` or the tensor ``anchor`` requires a gradient.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows_BX: Tensor, anchor: Tensor | None, exchange: _Exchange, inverse: _Exchange
    ) -> Tensor:
        ctx.inverse = inverse  # type: ignore[attr-defined]
        return exchange(rows_BX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BX: Tensor) -> tuple[Tensor | None, None, None, None]:
        return ctx.inverse(grad_BX) if ctx.needs_input_grad[0] else None, None, None, None
