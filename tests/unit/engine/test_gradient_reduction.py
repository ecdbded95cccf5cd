"""Sums in shared memory, with every trainer a thread that has its own place in a process group."""

import pytest
import torch
import torch.distributed as dist
from support.shared_memory import SECONDS, at_once, together

from hybrid.engine.gradient_reduction import SharedMemoryReduce
from hybrid.transport.shared_memory.shared_block import MOST_MEMBERS

CPU = torch.device("cpu")


def joined(size: int) -> list[SharedMemoryReduce]:
    """The parts of a group, one a rank."""
    parts = together(size, lambda rank, group: SharedMemoryReduce.join(group, rank, CPU, SECONDS))
    assert all(part is not None for part in parts)
    return [part for part in parts if part is not None]


@pytest.mark.parametrize("size", [2, 3, MOST_MEMBERS])
def test_sum_is_in_rank_order(size: int) -> None:
    parts = joined(size)
    generator = torch.Generator().manual_seed(0)
    for num in (1, 1000, 7, 100_000, 1000):  # slots grow, and are used again
        tensors = [torch.rand(num, generator=generator) for _ in range(size)]
        expected = tensors[0] + tensors[1]
        for tensor in tensors[2:]:
            expected = expected + tensor
        at_once(SharedMemoryReduce.sum_, parts, tensors)
        assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_successive_sums_do_not_overwrite_unread_slots() -> None:
    def train(rank: int, part: SharedMemoryReduce) -> None:
        for step in range(300):
            numbers = torch.full((500,), float((rank + 1) * step), dtype=torch.float64)
            part.sum_(numbers)
            assert (numbers == 6.0 * step).all()

    at_once(train, range(3), joined(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_any_type(dtype: torch.dtype) -> None:
    tensors = [torch.ones(5, dtype=dtype), torch.full((5,), 2.0, dtype=dtype)]
    at_once(SharedMemoryReduce.sum_, joined(2), tensors)
    assert all(torch.equal(tensor, torch.full((5,), 3.0, dtype=dtype)) for tensor in tensors)


def test_too_many_trainers_or_a_gpu_use_the_process_group() -> None:
    def join(rank: int, group: dist.ProcessGroup, *others: torch.device) -> SharedMemoryReduce | None:
        return SharedMemoryReduce.join(group, rank, (CPU, *others)[min(rank, len(others))], SECONDS)

    assert together(1, join) == [None]
    assert together(2, lambda rank, group: join(rank, group, torch.device("cuda"))) == [None, None]
    size = MOST_MEMBERS + 2
    assert together(size, join) == [None] * size
