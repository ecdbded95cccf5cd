"""Batches of the trainers' own, of different numbers and sizes, as steps that all of them take."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from hybrid.batch import Batch

_MANY = 1 << 60  # steps, where nobody knows how many


def evened(
    batches: Iterable[Batch], empty: Batch, group: dist.ProcessGroup, device: torch.device
) -> Iterator[Batch]:
    """Batches of trainers that have different numbers of them, or of different sizes, step by step.

    Each step's ``global_size`` becomes the samples of all trainers together. A trainer that has run out
    gets empty batches that say so, until all have: it goes on reducing gradients with the others. Where
    every trainer has a sequence, all sizes are known at once; else they meet step by step.

    Args:
        batches: this trainer's own.
        empty: a batch of no samples.
        group: of all trainers, each of which must iterate.
        device: on which ``group`` reduces.
    """
    num_steps = len(batches) if isinstance(batches, Sequence) else _MANY
    (most,) = _reduced([num_steps], group, device, dist.ReduceOp.MAX)
    if most < _MANY:
        assert isinstance(batches, Sequence)
        sizes = [len(batch.labels) for batch in batches] + [0] * (most - num_steps)
        for step, global_size in enumerate(_reduced(sizes, group, device, dist.ReduceOp.SUM)):
            yield _share(batches[step] if step < num_steps else None, empty, global_size)
        return
    rest = iter(batches)
    while True:
        batch = next(rest, None)
        size = 0 if batch is None else len(batch.labels)
        num_going_on, global_size = _reduced([batch is not None, size], group, device, dist.ReduceOp.SUM)
        if not num_going_on:
            return
        yield _share(batch, empty, global_size)


def _share(batch: Batch | None, empty: Batch, global_size: int) -> Batch:
    return (batch or empty)._replace(global_size=global_size, ended=batch is None)


def _reduced(
    values: list[int], group: dist.ProcessGroup, device: torch.device, operation: dist.ReduceOp.RedOpType
) -> list[int]:
    reduced = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(reduced, operation, group=group)
    return reduced.tolist()
