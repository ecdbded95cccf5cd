"""Alignment of batches that differ between trainers in number and size."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.batch import Batch, by_task
from hybrid.dense.tensor_parallel import gather_rows
from hybrid.errors import DataError

_UNKNOWN = 1 << 60  # as a number of steps


def align_batches(
    batches: Iterable[Batch],
    empty: Batch,
    group: dist.ProcessGroup,
    num_tasks: int = 1,
    has_ranking: bool = False,
) -> Iterator[Batch]:
    """Give all trainers the same number of steps, and each batch the totals of its step.

    ``global_size`` becomes the number of samples of all trainers, ``total_weights`` the sum of their weights,
    and ``total_groups``, for ranking losses, the sum of the weights of groups. A trainer without further
    batches gets empty batches, marked as ended, and so takes part in the all-reduce of gradients. If every
    trainer has a sequence, all sizes are exchanged at once, otherwise step by step.

    Args:
        group: all trainers, each of which must iterate.
        num_tasks: columns of the weights.
        has_ranking: whether there is a ranking loss; :meth:`Batch.check_groups` has checked the groups.

    Raises:
        DataError: a group is split between trainers.
    """
    most_steps = torch.tensor(len(batches) if isinstance(batches, Sequence) else _UNKNOWN)
    if group.size() > 1:
        dist.all_reduce(most_steps, dist.ReduceOp.MAX, group=group)
    remaining = iter(batches)

    def exchange(num_batches: int) -> list[tuple[Batch | None, Tensor]]:
        own = [next(remaining, None) for _ in range(num_batches)]
        sums = [_sums(batch, num_tasks, has_ranking) for batch in own]
        totals = torch.tensor(sums, dtype=torch.float64)
        if group.size() > 1:
            dist.all_reduce(totals, group=group)
        return list(zip(own, totals, strict=True))

    is_known = int(most_steps) < _UNKNOWN
    while steps := exchange(int(most_steps) if is_known else 1):
        for batch, step_totals in steps:
            if not step_totals[0]:
                return
            if has_ranking:
                _check_no_split_group(batch, group)
            yield _with_totals(batch, empty, step_totals, num_tasks)
        if is_known:
            return


def _sums(batch: Batch | None, num_tasks: int, has_ranking: bool) -> list[float]:
    """Return the summands of the totals: 1 for a trainer with a batch, samples, and weights by task."""
    if batch is None:
        return [0.0] * (2 + num_tasks * (1 + has_ranking))
    size = float(len(batch.labels))
    sums = [1.0, size]
    if batch.weights is None:
        sums += [size] * num_tasks
    else:
        sums += by_task(batch.weights, num_tasks).double().sum(0).tolist()
    return sums + batch.ranking_totals(num_tasks).tolist() if has_ranking else sums


def _with_totals(batch: Batch | None, empty: Batch, step_totals: Tensor, num_tasks: int) -> Batch:
    """Return the local batch with the totals of its step, and with weights if any trainer has weights."""
    global_size = int(step_totals[1])
    totals_T, groups_T = step_totals[2 : 2 + num_tasks], step_totals[2 + num_tasks :]
    local = batch or empty
    if local.weights is None and not bool((totals_T == global_size).all()):
        local = local._replace(weights=torch.ones_like(local.labels))
    return local._replace(
        global_size=global_size,
        total_weights=totals_T,
        total_groups=groups_T if len(groups_T) else None,
        ended=batch is None,
    )


def _check_no_split_group(batch: Batch | None, group: dist.ProcessGroup) -> None:
    """Raise DataError if several trainers have samples of one group in a step."""
    groups = None if batch is None else batch.groups
    local_U = torch.empty(0, dtype=torch.int64) if groups is None else groups.unique()
    slices = gather_slices(local_U, group)
    groups_U, counts_U = torch.cat(slices).unique(return_counts=True)
    if bool((counts_U > 1).any()):
        split = groups_U[counts_U > 1][0]
        first, second, *_ = [trainer for trainer, each in enumerate(slices) if bool((each == split).any())]
        raise DataError(
            f"group {split.item()} is split: trainers {first} and {second} have samples of it in one step"
        )


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
