"""Sums of gradients in shared memory; each trainer is a thread with its own rank."""

import pytest
import torch
import torch.distributed as dist
from support.shared_memory import SECONDS, at_once, together

from hybrid.engine.ddp import SharedMemoryReduce
from hybrid.transport.shared_memory.shared_slots import MAX_MEMBERS

CPU = torch.device("cpu")


def joined(size: int) -> list[SharedMemoryReduce]:
    """Return what each rank of a group has joined."""
    members = together(size, lambda rank, group: SharedMemoryReduce.join(group, rank, CPU, SECONDS))
    assert all(member is not None for member in members)
    return [member for member in members if member is not None]


@pytest.mark.parametrize("size", [2, 3, MAX_MEMBERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sum_is_in_rank_order(size: int, dtype: torch.dtype) -> None:
    members = joined(size)
    generator = torch.Generator().manual_seed(0)
    for num in (1, 1000, 7, 100_000, 1000):  # slots grow, and are used again
        tensors = [torch.rand(num, generator=generator, dtype=dtype) for _ in range(size)]
        expected = tensors[0] + tensors[1]
        for tensor in tensors[2:]:
            expected = expected + tensor
        at_once(SharedMemoryReduce.sum_, members, tensors)
        assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_successive_sums_do_not_overwrite_unread_slots() -> None:
    def train(rank: int, member: SharedMemoryReduce) -> None:
        for step in range(300):
            numbers = torch.full((500,), float((rank + 1) * step), dtype=torch.float64)
            member.sum_(numbers)
            assert (numbers == 6.0 * step).all()

    at_once(train, range(3), joined(3))


def test_too_many_trainers_or_a_gpu_use_the_process_group() -> None:
    def join(rank: int, group: dist.ProcessGroup, *others: torch.device) -> SharedMemoryReduce | None:
        return SharedMemoryReduce.join(group, rank, (CPU, *others)[min(rank, len(others))], SECONDS)

    assert together(1, join) == [None]
    assert together(2, lambda rank, group: join(rank, group, torch.device("cuda"))) == [None, None]
    size = MAX_MEMBERS + 2
    assert together(size, join) == [None] * size
