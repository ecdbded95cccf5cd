"""Batches of the trainers' own, of different numbers and sizes, as steps that all of them take."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from hybrid.batch import Batch, by_task

_MANY = 1 << 60  # steps, where nobody knows how many


def evened(
    batches: Iterable[Batch],
    empty: Batch,
    group: dist.ProcessGroup,
    device: torch.device,
    num_tasks: int = 1,
) -> Iterator[Batch]:
    """Batches of trainers that have different numbers of them, or of different sizes, step by step.

    Each step's ``global_size`` becomes the samples of all trainers together, and its ``total_weights`` their
    weights. A trainer that has run out gets empty batches that say so, until all have: it goes on reducing
    gradients with the others. Where every trainer has a sequence, all sizes are known at once; else they meet
    step by step.

    Args:
        batches: this trainer's own.
        empty: a batch of no samples.
        group: of all trainers, each of which must iterate.
        device: on which ``group`` reduces.
        num_tasks: columns of the weights.
    """
    num_steps = len(batches) if isinstance(batches, Sequence) else _MANY
    most = int(_reduced([num_steps], torch.int64, group, device, dist.ReduceOp.MAX)[0])
    if most < _MANY:
        assert isinstance(batches, Sequence)
        sums = [_sums(batch, num_tasks) for batch in batches]
        sums += [_sums(None, num_tasks)] * (most - num_steps)
        flat = [each for step in sums for each in step]
        of_all = _reduced(flat, torch.float64, group, device, dist.ReduceOp.SUM).view(most, 2 + num_tasks)
        for step in range(most):
            yield _share(batches[step] if step < num_steps else None, empty, of_all[step])
        return
    rest = iter(batches)
    while True:
        batch = next(rest, None)
        of_step = _reduced(_sums(batch, num_tasks), torch.float64, group, device, dist.ReduceOp.SUM)
        if not of_step[0]:
            return
        yield _share(batch, empty, of_step)


def _sums(batch: Batch | None, num_tasks: int) -> list[float]:
    """What adds up over trainers: those that go on, their samples, and the weights of these by task."""
    if batch is None:
        return [0.0] * (2 + num_tasks)
    size = float(len(batch.labels))
    if batch.weights is None:
        return [1.0] + [size] * (1 + num_tasks)
    return [1.0, size, *by_task(batch.weights, num_tasks).double().sum(0).tolist()]


def _share(batch: Batch | None, empty: Batch, of_step: torch.Tensor) -> Batch:
    """A trainer's own batch, which knows of the others; with weights of 1 where only others have some."""
    global_size, totals_T = int(of_step[1]), of_step[2:]
    own = batch or empty
    if own.weights is None and not bool((totals_T == global_size).all()):
        own = own._replace(weights=torch.ones_like(own.labels))
    return own._replace(global_size=global_size, total_weights=totals_T, ended=batch is None)


def _reduced(
    values: Sequence[float],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
    operation: dist.ReduceOp.RedOpType,
) -> torch.Tensor:
    reduced = torch.tensor(values, dtype=dtype, device=device)
    dist.all_reduce(reduced, operation, group=group)
    return reduced.cpu()
