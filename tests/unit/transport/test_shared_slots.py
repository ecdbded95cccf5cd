"""Memory that threads share, each with its own rank in a process group."""

import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from support.shared_memory import SECONDS, at_once, joined, together
from support.users import connected_as_another_user, needs_root
from torch import Tensor

from hybrid.errors import ClusterError
from hybrid.transport.shared_memory import shared_slots
from hybrid.transport.shared_memory.shared_slots import MAX_MEMBERS, SharedSlots


def join(rank: int, group: dist.ProcessGroup) -> SharedSlots | None:
    return SharedSlots.join(group, 10 + rank, True, SECONDS)


def publish(view: SharedSlots, data: bytes) -> list[bytes]:
    """Publish data, and return what all members publish in the turn."""
    view.slot(len(data))[: len(data)] = data
    return [bytes(slot[: len(data)]) for slot in view.publish()]


@pytest.mark.parametrize("size", [2, 3, MAX_MEMBERS])
def test_each_member_reads_all_slots(size: int) -> None:
    views = joined(size)
    for length in (1, 1000, 7, 100_000, 5000, 1_000_000):  # slots grow, and are used again
        data = [bytes([65 + rank]) * length for rank in range(size)]
        assert at_once(publish, views, data) == [data] * size


def test_slots_may_grow_at_different_turns() -> None:
    views = joined(3)

    def take_turns(view: SharedSlots) -> None:
        for turn in range(200):
            length = 10_000 * (1 + turn // 40) if turn % 3 == view.rank else 10
            data = bytes([turn]) * length
            view.slot(length)[:length] = data
            assert all(bytes(slot[:10]) == bytes([turn]) * 10 for slot in view.publish())

    at_once(take_turns, views)


def test_a_lost_member_is_named_at_once() -> None:
    first, second = joined(2)
    for peer in second._peers.values():
        peer.close()
    with pytest.raises(ClusterError, match="trainer 1, on this host, ended during a step"):
        first.publish()


def test_a_late_member_is_named_after_the_timeout() -> None:
    first, second = joined(2, timeout_seconds=0.2)
    late = r"on this host, did not respond within cluster\.timeout_seconds$"
    with pytest.raises(ClusterError, match=rf"^trainer 1, {late}"):
        first.publish()
    second.publish()  # the first did come, once
    with pytest.raises(ClusterError, match=rf"^trainer 0, {late}"):
        second.publish()


def test_trainers_that_may_not_share_are_left_out() -> None:
    assert together(1, join) == [None]
    views = together(4, lambda rank, group: SharedSlots.join(group, rank, rank % 2 == 0, SECONDS))
    assert views[1] is views[3] is None
    assert [[m.index for m in view.members] for view in views if view] == [[0, 2], [0, 2]]


def test_many_trainers_of_a_host_form_several_groups() -> None:
    views = together(MAX_MEMBERS + 3, join)
    sizes = [len(view.members) for view in views if view]
    assert sizes == [MAX_MEMBERS] * MAX_MEMBERS + [3] * 3
    assert [m.index for m in views[-1].members] == [18, 19, 20] if views[-1] else False
    assert together(MAX_MEMBERS + 1, join)[-1] is None


def test_trainers_share_with_those_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = threading.local()

    def join_on_a_host(rank: int, group: dist.ProcessGroup) -> SharedSlots | None:
        hosts.name = f"host {rank % 2}"
        return join(rank, group)

    monkeypatch.setattr(shared_slots, "host_id", lambda: hosts.name)
    views = together(5, join_on_a_host)
    assert [[m.index - 10 for m in view.members] for view in views if view] == [
        [0, 2, 4],
        [1, 3],
        [0, 2, 4],
        [1, 3],
        [0, 2, 4],
    ]


def test_unsealed_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_unsealed(num_bytes: int) -> int:
        descriptor = os.memfd_create("hybrid")
        os.ftruncate(descriptor, num_bytes)
        return descriptor

    monkeypatch.setattr(shared_slots, "create_memory", create_unsealed)
    with pytest.raises(ClusterError, match=r"^trainer \d shares memory .*not sealed"):
        at_once(publish, joined(2), [b"a", b"b"])


@needs_root
def test_a_peer_of_another_user_does_not_block_members() -> None:
    class CrowdedGroup:
        """A process group to whose first member a peer of another user connects before the others."""

        def __init__(self, group: dist.ProcessGroup) -> None:
            self._group = group
            self.size = group.size

        def allgather(self, received: list[list[Tensor]], sent: list[Tensor]) -> dist.Work:
            if self._group.rank() == 0:
                _, name, _ = json.loads(bytes(sent[0].tolist()))
                stack.enter_context(connected_as_another_user(bytes.fromhex(name)))
            return self._group.allgather(received, sent)

    with ExitStack() as stack:
        views = together(2, lambda rank, group: join(rank, cast(Any, CrowdedGroup(group))))
        assert at_once(publish, views, [b"a", b"b"]) == [[b"a", b"b"]] * 2


def test_all_descriptors_are_closed() -> None:
    def descriptors() -> set[str]:
        return {name for name in os.listdir("/proc/self/fd") if "memfd:hybrid" in _target(name)}

    before = descriptors()
    views = joined(2)
    at_once(publish, views, [b"a" * 10_000] * 2)
    views[0].slot(1_000_000)  # which the other never receives
    assert len(descriptors() - before) > 4
    del views
    assert descriptors() - before == set()


def _target(descriptor: str) -> str:
    link = Path("/proc/self/fd") / descriptor
    return os.readlink(link) if link.is_symlink() else ""
