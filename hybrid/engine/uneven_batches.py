"""Alignment of batches that differ between trainers in number and size."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.batch import Batch, by_task
from hybrid.dense.tensor_parallel import gather_rows


def align_batches(
    batches: Iterable[Batch],
    empty: Batch,
    group: dist.ProcessGroup,
    num_tasks: int = 1,
    until: float = math.inf,
) -> Iterator[Batch]:
    """Give all trainers the same number of steps, and each batch the totals of its step.

    ``global_size`` becomes the number of samples of all trainers, ``total_weights`` the sum of their weights,
    and ``event_time`` the largest of their event times. A trainer without further batches gets empty batches,
    and so takes part in the steps of the others.

    Args:
        group: all trainers, each of which must iterate.
        num_tasks: columns of the weights.
        until: event time that ends the iteration, after the first step that reaches it.
    """
    remaining = iter(batches)
    while True:
        batch = next(remaining, None)
        times = [0.0] * group.size()  # the sum over all trainers has the time of each
        times[group.rank()] = -math.inf if batch is None else batch.event_time
        # The number of trainers with a batch, of samples, the weights by task, and the times.
        step_totals = torch.tensor([*_sums(batch, num_tasks), *times], dtype=torch.float64)
        if group.size() > 1:
            dist.all_reduce(step_totals, group=group)
        if not step_totals[0]:
            return
        event_time = max(step_totals[2 + num_tasks :].tolist())
        yield _with_totals(batch, empty, step_totals[: 2 + num_tasks])._replace(event_time=event_time)
        if event_time >= until:
            return


def _sums(batch: Batch | None, num_tasks: int) -> list[float]:
    """Return the summands of the totals: 1 for a trainer with a batch, samples, and weights by task."""
    if batch is None:
        return [0.0] * (2 + num_tasks)
    size = float(len(batch.labels))
    if batch.weights is None:
        return [1.0, size] + [size] * num_tasks
    return [1.0, size, *by_task(batch.weights, num_tasks).double().sum(0).tolist()]


def _with_totals(batch: Batch | None, empty: Batch, step_totals: Tensor) -> Batch:
    """Return the local batch with the totals of its step, and with weights if any trainer has weights."""
    global_size, totals_T = int(step_totals[1]), step_totals[2:]
    local = batch or empty
    if local.weights is None and not bool((totals_T == global_size).all()):
        local = local._replace(weights=torch.ones_like(local.labels))
    return local._replace(global_size=global_size, total_weights=totals_T)


def gather_slices(values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all trainers in rank order; all trainers must call it.

    Args:
        values: the local tensor, (n, ...), on the CPU; n may differ between trainers, and may be 0.
    """
    local = torch.tensor([len(values)])
    counts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(counts, local, group=group)
    sizes = [int(each) for each in counts]
    return list(gather_rows(values, sizes, group).split(sizes))


def gather_with_gradients(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the tensors of all trainers in rank order, as :func:`gather_slices`, on their device.

    The gradient is the sum over the gradients on all trainers, so every trainer must use the result in its
    loss.
    """
    if group.size() == 1:
        return values
    gathered: Tensor = _Gather.apply(values, group)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Gathers slices; the backward pass sums the gradients of all trainers.

    All trainers run the same graph in the same order, so this all-reduce has the same position among those of
    DDP on every trainer.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        slices = gather_slices(values.cpu(), group)
        ctx.group, ctx.sizes = group, [len(each) for each in slices]
        return torch.cat(slices).to(values.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].to("cpu", copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.to(grads[0].device).split(ctx.sizes)[ctx.group.rank()], None
