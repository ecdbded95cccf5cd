"""A stage that a tensor group computes together, on the samples of all its trainers.

Every trainer keeps its slice of the batch. The slices of the group are gathered for the stage only::

    own inputs_bX ── all-gather ── inputs_BX ── stage ── outputs_BY ── own rows ── outputs_bY

B is the sum of the group's b.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable


class SharedStage(nn.Module):
    """A stage that a tensor group computes together, on the samples of all its ranks.

    Args:
        stage: maps tensors with one row per sample to one tensor; the same on all ranks, such as a
            :class:`TensorParallel`.
        group: the ranks; all call it together, each with its own samples, possibly none.
    """

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.stage = stage
        self._group = group
        self._anchor = torch.zeros(0, requires_grad=True)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the output of the stage for the local rows of ``inputs``.

        Raises:
            ValueError: inputs or output differ in their number of rows.
        """
        if self._group.size() == 1:
            whole_B: Tensor = self.stage(*inputs)
            return whole_B
        rows, is_differentiable = _agree(inputs, self._group)
        # Autograd runs the collectives of the stage's graph in the reverse order of the forward pass, so all
        # ranks need the same graph. A slice without samples has no lookup, and its input requires no
        # gradient. So all ranks record an input if one rank does.
        gathered = [
            _Gather.apply(x, self._anchor if record else None, rows, self._group)  # type: ignore[no-untyped-call]
            for x, record in zip(inputs, is_differentiable, strict=True)
        ]
        output = self.stage(*gathered)
        if output.size(0) != sum(rows):
            raise ValueError(f"the stage gives {output.size(0)} rows for {sum(rows)} samples")
        own_rows: Tensor = _OwnRows.apply(output, rows, self._group)  # type: ignore[no-untyped-call]
        return own_rows


def _agree(inputs: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[list[int], list[bool]]:
    """Return the number of rows of each rank, and which inputs need a gradient on any rank."""
    sizes = {len(x) for x in inputs}
    if len(sizes) != 1:
        raise ValueError(f"inputs of a stage must have as many rows as each other, not {sorted(sizes)}")
    own = torch.tensor([*sizes, *(int(x.requires_grad) for x in inputs)], device=inputs[0].device)
    of_ranks = own.new_empty(group.size() * len(own))
    dist.all_gather_single(of_ranks, own, group=group)
    rows, *flags = of_ranks.view(-1, len(own)).t().tolist()
    return rows, [any(of_input) for of_input in flags]


def _all_rows(own_bX: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gather the rows of all ranks, in rank order."""
    longest = max(rows)
    padded_bX = own_bX.contiguous()  # as NCCL requires
    if len(own_bX) < longest:  # collectives need tensors of one size
        padded_bX = own_bX.new_zeros(longest, *own_bX.shape[1:])
        padded_bX[: len(own_bX)] = own_bX
    all_BX = own_bX.new_empty(len(rows) * longest, *own_bX.shape[1:])
    dist.all_gather_single(all_BX, padded_bX, group=group)
    if min(rows) == longest:
        return all_BX
    return torch.cat([part_bX[:size] for part_bX, size in zip(all_BX.split(longest), rows, strict=True)])


def _own_rows(all_BX: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return a copy of the local rows, since RPC would send the whole storage of a view."""
    start = sum(rows[: group.rank()])
    return all_BX[start : start + rows[group.rank()]].clone()


class _Gather(torch.autograd.Function):
    """Gathers rows. Each rank has their full gradient, so the backward pass needs no communication."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, own_bX: Tensor, anchor: Tensor | None, rows: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.arguments = rows, group  # type: ignore[attr-defined]
        return _all_rows(own_bX, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BX: Tensor) -> tuple[Tensor | None, None, None, None]:
        own_bX = _own_rows(grad_BX, *ctx.arguments) if ctx.needs_input_grad[0] else None
        return own_bX, None, None, None


class _OwnRows(torch.autograd.Function):
    """Selects the local rows of an output; the backward pass gathers the gradients of all ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, all_BY: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = rows, group  # type: ignore[attr-defined]
        return _own_rows(all_BY, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bY: Tensor) -> tuple[Tensor, None, None]:
        return _all_rows(grad_bY, *ctx.arguments), None, None
