"""Sums of gradients in shared memory; each trainer is a thread with its own rank in a process group."""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.shared_memory import at_once, join, joined, together
from support.users import connected_as_another_user
from torch import Tensor

from hybrid.errors import ClusterError
from hybrid.shared_memory import shared_slots
from hybrid.shared_memory.shared_slots import MAX_MEMBERS, SharedSlots


@pytest.mark.parametrize("size", [2, 3, MAX_MEMBERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sum_is_in_rank_order(size: int, dtype: torch.dtype) -> None:
    members = joined(size)
    generator = torch.Generator().manual_seed(0)
    for num in (1, 1000, 7, 100_000, 1000):
        tensors = [torch.rand(num, generator=generator, dtype=dtype) for _ in range(size)]
        expected = tensors[0] + tensors[1]
        for tensor in tensors[2:]:
            expected = expected + tensor
        at_once(SharedSlots.sum_, members, tensors)
        assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_successive_sums_do_not_overwrite_unread_slots() -> None:
    def train(rank: int, member: SharedSlots) -> None:
        for step in range(300):
            numbers = torch.full((500,), float((rank + 1) * step), dtype=torch.float64)
            member.sum_(numbers)
            assert (numbers == 6.0 * step).all()

    at_once(train, range(3), joined(3))


def test_a_lost_member_is_named_at_once() -> None:
    members = joined(2)
    del members[1]
    with pytest.raises(ClusterError, match=r"^trainer 1, .*ended"):
        members[0].sum_(torch.ones(1))


def test_a_late_member_is_named_after_the_timeout() -> None:
    first, second = joined(2, timeout_seconds=0.2)
    with pytest.raises(ClusterError, match=r"^trainer 1, .*cluster\.timeout_seconds$"):
        first.sum_(torch.ones(1))
    second.sum_(torch.ones(1))  # the first did come, once
    with pytest.raises(ClusterError, match=r"^trainer 0, .*cluster\.timeout_seconds$"):
        second.sum_(torch.ones(1))


def test_trainers_share_all_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few or too many trainers, a trainer with a GPU, and trainers of several hosts do not share."""
    hosts = threading.local()

    def join_on_a_host(rank: int, group: dist.ProcessGroup) -> SharedSlots | None:
        hosts.name = f"host {rank % 2}"
        return join(rank, group)

    for size in (1, MAX_MEMBERS + 2):
        assert together(size, join) == [None] * size
    assert together(4, lambda rank, group: join(rank, group, may_share=rank % 2 == 0)) == [None] * 4
    monkeypatch.setattr(shared_slots, "host_id", lambda: hosts.name)
    assert together(2, join_on_a_host) == [None, None]


def test_unsealed_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_unsealed(num_bytes: int) -> int:
        descriptor = os.memfd_create("hybrid")
        os.ftruncate(descriptor, num_bytes)
        return descriptor

    monkeypatch.setattr(shared_slots, "create_memory", create_unsealed)
    with pytest.raises(ClusterError, match=r"^trainer \d .*not sealed"):
        joined(2)


def test_the_wait_for_the_last_trainer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group waits for the last trainer when the trainers exchange addresses."""
    now = time.monotonic

    def join_late(rank: int, group: dist.ProcessGroup) -> SharedSlots | None:
        class LateGroup:
            rank, size = group.rank, group.size

            def allgather(self, *tensors: Any) -> dist.Work:
                monkeypatch.setattr(time, "monotonic", lambda: now() + 1000.0)
                work = group.allgather(*tensors)
                work.wait()
                threading.Event().wait(0.05 * group.rank())  # before it connects to rank 0
                return work

        return join(rank, cast(dist.ProcessGroup, LateGroup()))

    assert all(together(2, join_late))


def with_address(group: dist.ProcessGroup, change: Callable[[str], str]) -> dist.ProcessGroup:
    """Return a process group that gives ``change(name)`` as the name of the first member's socket."""

    class ChangedGroup:
        rank, size = group.rank, group.size

        def allgather(self, received: list[list[Tensor]], sent: list[Tensor]) -> dist.Work:
            if group.rank() == 0:
                host, name, trainer = json.loads(bytes(sent[0].tolist()))
                text = json.dumps((host, change(name), trainer)).encode().ljust(len(sent[0]))
                sent[0].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            return group.allgather(received, sent)

    return cast(dist.ProcessGroup, ChangedGroup())


def test_a_member_that_cannot_be_reached_is_an_error() -> None:
    def join_nobody(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(ClusterError, match=f"^trainer {rank} "):
            join(rank, with_address(group, lambda _: b"\0nobody".hex()), timeout_seconds=0.2)

    together(2, join_nobody)


@pytest.mark.root
def test_a_peer_of_another_user_does_not_block_members() -> None:
    def crowd(name: str) -> str:
        stack.enter_context(connected_as_another_user(bytes.fromhex(name)))
        return name

    with ExitStack() as stack:
        members = together(2, lambda rank, group: join(rank, with_address(group, crowd)))
        at_once(SharedSlots.sum_, members, tensors := [torch.ones(1), torch.ones(1)])
        assert tensors == [2, 2]


def test_all_descriptors_are_closed() -> None:
    def descriptors() -> set[Path]:
        files = Path("/proc/self/fd").iterdir()  # one of them has listed the others, and is closed
        return {file for file in files if "memfd:hybrid" in str(file.resolve())}

    before = descriptors()
    members = joined(2)
    assert len(descriptors() - before) == 4  # each maps two memories
    del members
    assert descriptors() - before == set()
