"""Batches of the trainers' own, of different numbers and sizes, as steps that all of them take."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.batch import Batch, by_task
from hybrid.errors import DataError

_MANY = 1 << 60  # steps, where nobody knows how many


def align_batches(
    batches: Iterable[Batch],
    empty: Batch,
    group: dist.ProcessGroup,
    device: torch.device,
    num_tasks: int = 1,
    has_ranking: bool = False,
) -> Iterator[Batch]:
    """Batches of trainers that have different numbers of them, or of different sizes, step by step.

    Each step's ``global_size`` becomes the samples of all trainers together, its ``total_weights`` their
    weights, and ``total_groups``, where a loss is of the order within groups, what these count. A trainer
    that has run out gets empty batches that say so, until all have: it goes on reducing gradients with the
    others. Where every trainer has a sequence, all sizes are known at once; else they meet step by step.

    Args:
        batches: this trainer's own.
        empty: a batch of no samples.
        group: of all trainers, each of which must iterate.
        device: on which ``group`` reduces.
        num_tasks: columns of the weights.
        has_ranking: whether a loss is of the order within groups; :meth:`Batch.check_groups` has seen them.

    Raises:
        DataError: a group is split between trainers.
    """
    sums_of = partial(_sums, num_tasks=num_tasks, has_ranking=has_ranking)
    num_steps = len(batches) if isinstance(batches, Sequence) else _MANY
    most = int(_reduced([num_steps], torch.int64, group, device, dist.ReduceOp.MAX)[0])
    if most < _MANY:
        assert isinstance(batches, Sequence)
        sums = [sums_of(batch) for batch in batches] + [sums_of(None)] * (most - num_steps)
        flat = [each for step in sums for each in step]
        of_all = _reduced(flat, torch.float64, group, device, dist.ReduceOp.SUM)
        for step, of_step in enumerate(of_all.view(most, len(sums_of(None)))):
            batch = batches[step] if step < num_steps else None
            if has_ranking:
                _refuse_split(batch, group, device)
            yield _share(batch, empty, of_step, num_tasks)
        return
    rest = iter(batches)
    while True:
        batch = next(rest, None)
        of_step = _reduced(sums_of(batch), torch.float64, group, device, dist.ReduceOp.SUM)
        if not of_step[0]:
            return
        if has_ranking:
            _refuse_split(batch, group, device)
        yield _share(batch, empty, of_step, num_tasks)


def _sums(batch: Batch | None, num_tasks: int, has_ranking: bool) -> list[float]:
    """What adds up over trainers: those that go on, their samples, and the weights of these, and of their
    groups where a loss reads them, by task."""
    if batch is None:
        return [0.0] * (2 + num_tasks * (1 + has_ranking))
    size = float(len(batch.labels))
    sums = [1.0, size]
    if batch.weights is None:
        sums += [size] * num_tasks
    else:
        sums += by_task(batch.weights, num_tasks).double().sum(0).tolist()
    return sums + batch.order_totals(num_tasks).tolist() if has_ranking else sums


def _share(batch: Batch | None, empty: Batch, of_step: Tensor, num_tasks: int) -> Batch:
    """A trainer's own batch, which knows of the others; with weights of 1 where only others have some."""
    global_size, totals_T, groups_T = int(of_step[1]), of_step[2 : 2 + num_tasks], of_step[2 + num_tasks :]
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
    """DataError where trainers have samples of one group in a step."""
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


def _reduced(
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
    """All trainers' tensors, on ``device``, in the order of the trainers; all of them call it at once.

    Args:
        values: this trainer's, (n, ...); n may be another with each, and 0.
        device: where the group's collectives take tensors.
    """
    own = torch.tensor([len(values)], device=device)
    counted = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(counted, own, group=group)
    sizes = [int(each) for each in counted]
    # Collectives take tensors of one shape.
    padded = torch.zeros(max(sizes), *values.shape[1:], dtype=values.dtype, device=device)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]
