"""Alignment of batches that differ between trainers in number and size."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.batch import Batch, by_task
from hybrid.dense.tensor_parallel import gather_rows


def align_batches(
    batches: Iterable[Batch], empty: Batch, group: dist.ProcessGroup, num_tasks: int = 1
) -> Iterator[Batch]:
    """Give all trainers the same number of steps, and each batch the totals of its step.

    ``global_size`` becomes the number of samples of all trainers, and ``total_weights`` the sum of their
    weights. A trainer without further batches gets empty batches, marked as ended, and so takes part in the
    all-reduce of gradients. One batch is read ahead: its totals are summed while the caller takes a step.

    Args:
        group: all trainers, each of which must iterate.
        num_tasks: columns of the weights.
    """
    remaining = iter(batches)

    def read() -> tuple[Batch | None, Tensor, dist.Work | None]:
        batch = next(remaining, None)
        totals = torch.tensor(_sums(batch, num_tasks), dtype=torch.float64)
        work = dist.all_reduce(totals, group=group, async_op=True) if group.size() > 1 else None
        return batch, totals, work

    ahead = read()
    while True:
        batch, step_totals, work = ahead
        if work is not None:
            work.wait()
        if not step_totals[0]:
            return
        ahead = read()
        yield _with_totals(batch, empty, step_totals)


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
    return local._replace(global_size=global_size, total_weights=totals_T, ended=batch is None)


def gather_slices(values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all trainers in rank order; all trainers must call it.

    Args:
        values: the local tensor of the CPU, (n, ...); n may differ between trainers, and may be 0.
    """
    local = torch.tensor([len(values)])
    counts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(counts, local, group=group)
    sizes = [int(each) for each in counts]
    return list(gather_rows(values, sizes, group).split(sizes))
