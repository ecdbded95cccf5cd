"""Steps with batches that differ between trainers in number and size, and collectives for their tensors."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.batch import Batch, by_task
from hybrid.dense.tensor_parallel import ExchangeRows, gather_rows


def align_batches(
    batches: Iterable[Batch],
    empty: Batch,
    group: dist.ProcessGroup,
    num_tasks: int = 1,
    until: float = math.inf,
) -> Iterator[Batch]:
    """Yield the same number of batches on all trainers, with the totals of each step over all trainers.

    ``global_size`` becomes the number of samples of all trainers, ``total_weights`` the sum of their weights,
    and ``event_time`` their largest event time. Batches get weights of 1 if only other trainers have weights.

    Args:
        empty: the batch for the steps of a trainer that has no further batches, while others have.
        group: all trainers, each of which must iterate.
        num_tasks: number of columns of the weights.
        until: event time that ends the iteration, after the first step that reaches it.
    """
    remaining = iter(batches)
    while True:
        batch = next(remaining, None)
        # The number of trainers with a batch, the number of samples, the weights by task, and the event time
        # of each trainer, which is 0 on all others.
        totals = torch.zeros(2 + num_tasks + group.size(), dtype=torch.float64)
        weights_T, times = totals[2 : 2 + num_tasks], totals[2 + num_tasks :]
        times[group.rank()] = -math.inf
        if batch is not None:
            totals[0] = 1
            totals[1] = size = len(batch.labels)
            weights = batch.weights
            weights_T[:] = size if weights is None else by_task(weights, num_tasks).double().sum(0)
            times[group.rank()] = batch.event_time
        if group.size() > 1:
            dist.all_reduce(totals, group=group)
        if not totals[0]:
            return
        local, global_size, event_time = batch or empty, int(totals[1]), times.max().item()
        if local.weights is None and not bool((weights_T == global_size).all()):
            local = local._replace(weights=torch.ones_like(local.labels))  # another trainer has weights
        yield local._replace(global_size=global_size, total_weights=weights_T, event_time=event_time)
        if event_time >= until:
            return


def gather_slices(values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all trainers in rank order; all trainers must call this together.

    Args:
        values: the local tensor, (n, ...), on the CPU; n may differ between trainers, and may be 0.
    """
    sizes = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_single(sizes, torch.tensor([len(values)]), group=group)
    return list(gather_rows(values, sizes.tolist(), group).split(sizes.tolist()))


def gather_with_gradients(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the concatenated tensors of all trainers, in rank order, on the device of ``values``.

    All trainers must call this together. The backward pass sums the gradients of all trainers' results, so
    every trainer must use the result in its loss.
    """
    if group.size() == 1:
        return values
    slices = gather_slices(values.detach().cpu(), group)
    sizes = [len(each) for each in slices]
    all_values = torch.cat(slices).to(values.device)

    def sum_gradients(grad: Tensor) -> Tensor:
        # All trainers run the same graph in the same order, so this all-reduce has the same position among
        # those of DDP on every trainer.
        total = grad.to("cpu", copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        of_trainers: tuple[Tensor, ...] = total.to(grad.device).split(sizes)
        return of_trainers[group.rank()]

    gathered: Tensor = ExchangeRows.apply(values, None, lambda _: all_values, sum_gradients)  # type: ignore[no-untyped-call]
    return gathered
