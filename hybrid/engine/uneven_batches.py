"""Alignment of batches that differ between trainers in number and size."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.batch import Batch, by_task
from hybrid.errors import DataError

_UNKNOWN = 1 << 60  # as a number of steps


def align_batches(
    batches: Iterable[Batch],
    empty: Batch,
    group: dist.ProcessGroup,
    device: torch.device,
    num_tasks: int = 1,
    has_ranking: bool = False,
) -> Iterator[Batch]:
    """Give all trainers the same number of steps, and each batch the totals of its step.

    ``global_size`` becomes the number of samples of all trainers, ``total_weights`` the sum of their weights,
    and ``total_groups``, for ranking losses, the sum of the weights of groups. A trainer without further
    batches gets empty batches, marked as ended, and so takes part in the all-reduce of gradients. If every
    trainer has a sequence, all sizes are exchanged at once, otherwise step by step.

    Args:
        batches: the batches of this trainer.
        empty: a batch of no samples.
        group: all trainers, each of which must iterate.
        device: on which ``group`` reduces.
        num_tasks: columns of the weights.
        has_ranking: whether there is a ranking loss; :meth:`Batch.check_groups` has checked the groups.

    Raises:
        DataError: a group is split between trainers.
    """
    sums_of = partial(_sums, num_tasks=num_tasks, has_ranking=has_ranking)
    num_steps = len(batches) if isinstance(batches, Sequence) else _UNKNOWN
    most = int(_all_reduce([num_steps], torch.int64, group, device, dist.ReduceOp.MAX)[0])
    if most < _UNKNOWN:
        assert isinstance(batches, Sequence)
        sums = [sums_of(batch) for batch in batches] + [sums_of(None)] * (most - num_steps)
        flat = [each for step in sums for each in step]
        totals = _all_reduce(flat, torch.float64, group, device, dist.ReduceOp.SUM)
        for step, step_totals in enumerate(totals.view(most, len(sums_of(None)))):
            batch = batches[step] if step < num_steps else None
            if has_ranking:
                _refuse_split(batch, group, device)
            yield _with_totals(batch, empty, step_totals, num_tasks)
        return
    rest = iter(batches)
    while True:
        batch = next(rest, None)
        step_totals = _all_reduce(sums_of(batch), torch.float64, group, device, dist.ReduceOp.SUM)
        if not step_totals[0]:
            return
        if has_ranking:
            _refuse_split(batch, group, device)
        yield _with_totals(batch, empty, step_totals, num_tasks)


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
    return sums + batch.order_totals(num_tasks).tolist() if has_ranking else sums


def _with_totals(batch: Batch | None, empty: Batch, step_totals: Tensor, num_tasks: int) -> Batch:
    """Return the local batch with the totals of its step, and with weights if any trainer has weights."""
    global_size, totals_T, groups_T = (
        int(step_totals[1]),
        step_totals[2 : 2 + num_tasks],
        step_totals[2 + num_tasks :],
    )
    own = batch or empty
    if own.weights is None and not bool((totals_T == global_size).all()):
        own = own._replace(weights=torch.ones_like(own.labels))
    return own._replace(
        global_size=global_size,
        total_weights=totals_T,
        total_groups=groups_T if len(groups_T) else None,
        ended=batch is None,
    )


def _refuse_split(batch: Batch | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise DataError if several trainers have samples of one group in a step."""
    groups = None if batch is None else batch.groups
    own_U = torch.empty(0, dtype=torch.int64) if groups is None else groups.unique()
    parts = gather_slices(own_U, group, device)
    found_U, counts_U = torch.cat(parts).unique(return_counts=True)
    if bool((counts_U > 1).any()):
        split = found_U[counts_U > 1][0]
        first, second, *_ = [trainer for trainer, part in enumerate(parts) if bool((part == split).any())]
        raise DataError(
            f"group {split.item()} is split: trainers {first} and {second} have samples of it in one step"
        )


def _all_reduce(
    values: Sequence[float],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
    operation: dist.ReduceOp.RedOpType,
) -> Tensor:
    reduced = torch.tensor(values, dtype=dtype, device=device)
    dist.all_reduce(reduced, operation, group=group)
    return reduced.cpu()


def gather_slices(values: Tensor, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """Return the tensors of all trainers, on ``device``, in rank order; all trainers must call it.

    Args:
        values: the local tensor, (n, ...); n may differ between trainers, and may be 0.
        device: on which the collectives of ``group`` take tensors.
    """
    own = torch.tensor([len(values)], device=device)
    counts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(counts, own, group=group)
    sizes = [int(each) for each in counts]
    # Collectives need tensors of one shape.
    padded = torch.zeros(max(sizes), *values.shape[1:], dtype=values.dtype, device=device)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]
