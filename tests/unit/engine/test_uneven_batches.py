"""Alignment of batches whose number and sizes differ between trainers."""

import torch
import torch.distributed as dist
from support.shared_memory import together

from hybrid.batch import Batch
from hybrid.engine.uneven_batches import align_batches

SIZES = ([3, 0, 1], [2, 0, 4, 5])


def test_missing_batches_become_empty_batches() -> None:
    empty = Batch.empty(1, 1)

    def align(rank: int, group: dist.ProcessGroup) -> list[tuple[int, int]]:
        batches = [empty._replace(labels=torch.ones(size)) for size in SIZES[rank]]
        steps = align_batches(batches, empty, group)
        return [(len(each.labels), each.global_size) for each in steps]

    assert together(2, align) == [
        [(3, 5), (0, 0), (1, 5), (0, 5)],
        [(2, 5), (0, 0), (4, 5), (5, 5)],
    ]
