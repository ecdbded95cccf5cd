"""Steps with batches that differ between trainers in number and size."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from hybrid.batch import Batch, by_task


def align_batches(
    batches: Iterable[Batch],
    empty: Batch,
    group: dist.ProcessGroup,
    num_tasks: int = 1,
    until: float = math.inf,
) -> Iterator[Batch]:
    """Yield the same number of batches on all trainers, with the totals of each step over all trainers.

    ``global_size`` becomes the number of samples of all trainers, ``total_weights`` the sum of their weights,
    and ``event_time`` their largest event time. If another trainer has weights, missing weights become 1.

    Args:
        empty: the batch that a trainer without further batches yields while other trainers have batches.
        group: all trainers, each of which must iterate.
        num_tasks: number of columns of the weights.
        until: the iteration ends after the first step whose event time is at least ``until``.
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
