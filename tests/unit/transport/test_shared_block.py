"""Memory shared by threads, each of which has its own place in a process group."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from support.shared_memory import SECONDS, at_once, joined, together
from support.users import connected_as_another_user, needs_root
from torch import Tensor

from hybrid.errors import ClusterError
from hybrid.transport.shared_memory import shared_block
from hybrid.transport.shared_memory.shared_block import MOST_MEMBERS, SharedMemory


def join(rank: int, group: dist.ProcessGroup) -> SharedMemory | None:
    return SharedMemory.join(group, 10 + rank, True, SECONDS)


def shown(part: SharedMemory, words: bytes) -> list[bytes]:
    """What all show in a turn, where this one shows these words."""
    part.slot(len(words))[: len(words)] = words
    return [bytes(slot[: len(words)]) for slot in part.publish()]


@pytest.mark.parametrize("size", [2, 3, MOST_MEMBERS])
def test_each_member_reads_all_slots(size: int) -> None:
    parts = joined(size)
    for length in (1, 1000, 7, 100_000, 5000, 1_000_000):  # slots grow, and are used again
        words = [bytes([65 + place]) * length for place in range(size)]
        assert at_once(shown, parts, words) == [words] * size


def test_slots_may_grow_at_different_turns() -> None:
    parts = joined(3)

    def take_turns(part: SharedMemory) -> None:
        for turn in range(200):
            length = 10_000 * (1 + turn // 40) if turn % 3 == part.rank else 10
            words = bytes([turn]) * length
            part.slot(length)[:length] = words
            assert all(bytes(slot[:10]) == bytes([turn]) * 10 for slot in part.publish())

    at_once(take_turns, parts)


def test_members_are_the_trainers_in_the_order_of_their_ranks() -> None:
    for place, part in enumerate(joined(3)):
        assert part.rank == place
        assert [str(each) for each in part.members] == ["trainer 0", "trainer 1", "trainer 2"]


def test_a_lost_member_is_named_at_once() -> None:
    first, second = joined(2)
    for peer in second._peers.values():
        peer.close()
    with pytest.raises(ClusterError, match="trainer 1, of this host, is gone during a step"):
        first.publish()


def test_a_late_member_is_named_after_the_timeout() -> None:
    first, second = joined(2, timeout_seconds=0.2)
    late = r"of this host, did not come in cluster\.timeout_seconds$"
    with pytest.raises(ClusterError, match=rf"^trainer 1, {late}"):
        first.publish()
    second.publish()  # the first did come, once
    with pytest.raises(ClusterError, match=rf"^trainer 0, {late}"):
        second.publish()


def test_trainers_that_may_not_share_are_left_out() -> None:
    assert together(1, join) == [None]
    parts = together(4, lambda rank, group: SharedMemory.join(group, rank, rank % 2 == 0, SECONDS))
    assert parts[1] is parts[3] is None
    assert [[m.index for m in part.members] for part in parts if part] == [[0, 2], [0, 2]]


def test_many_trainers_of_a_host_form_several_groups() -> None:
    parts = together(MOST_MEMBERS + 3, join)
    sizes = [len(part.members) for part in parts if part]
    assert sizes == [MOST_MEMBERS] * MOST_MEMBERS + [3] * 3
    assert [m.index for m in parts[-1].members] == [18, 19, 20] if parts[-1] else False
    assert together(MOST_MEMBERS + 1, join)[-1] is None


def test_trainers_share_with_those_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = threading.local()

    def join_on_a_host(rank: int, group: dist.ProcessGroup) -> SharedMemory | None:
        hosts.name = f"host {rank % 2}"
        return join(rank, group)

    monkeypatch.setattr(shared_block, "own_host", lambda: hosts.name)
    parts = together(5, join_on_a_host)
    assert [[m.index - 10 for m in part.members] for part in parts if part] == [
        [0, 2, 4],
        [1, 3],
        [0, 2, 4],
        [1, 3],
        [0, 2, 4],
    ]


class CrowdedGroup:
    """A process group; unauthenticated peers connect to its first member before the members do.

    Args:
        connect: called with the address of the first member, and the token that members send.
    """

    def __init__(self, group: dist.ProcessGroup, connect: Callable[[bytes, bytes], object]) -> None:
        self._group = group
        self._connect = connect
        self.size = group.size

    def allgather(self, received: list[list[Tensor]], sent: list[Tensor]) -> dist.Work:
        if self._group.rank() == 0:
            _, name, token, _ = json.loads(bytes(sent[0].tolist()))
            self._connect(bytes.fromhex(name), bytes.fromhex(token))
        return self._group.allgather(received, sent)


def joined_after(connect: Callable[[bytes, bytes], object]) -> list[SharedMemory | None]:
    """Return the views of two members, in a crowded group."""

    def join(rank: int, group: dist.ProcessGroup) -> SharedMemory | None:
        return SharedMemory.join(cast(Any, CrowdedGroup(group, connect)), rank, True, SECONDS)

    return together(2, join)


@pytest.mark.parametrize(
    "hellos",
    [
        lambda _: [b"", bytes([1]) + b"x" * 16, None],
        lambda token: [bytes([0]) + token, bytes([2]) + token],
    ],
    ids=["silent, wrong, closed", "places that are not expected"],
)
def test_unauthenticated_peers_are_rejected(hellos: Callable[[bytes], list[bytes | None]]) -> None:
    """They come before the trainers' own connections."""
    with ExitStack() as stack:

        def connect(address: bytes, token: bytes) -> None:
            for hello in hellos(token):
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                stranger.connect(address)
                if hello is None:
                    stranger.close()
                else:
                    stranger.sendall(hello)

        assert at_once(shown, joined_after(connect), [b"a", b"b"]) == [[b"a", b"b"]] * 2


def test_a_greeting_in_chunks_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            for byte in data:
                time.sleep(0.001)
                self.send(bytes([byte]))

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Slow)
        parts = joined(2, timeout_seconds=2.0)
    assert at_once(shown, parts, [b"a", b"b"]) == [[b"a", b"b"]] * 2


def test_unsealed_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_unsealed(num_bytes: int) -> int:
        descriptor = os.memfd_create("hybrid")
        os.ftruncate(descriptor, num_bytes)
        return descriptor

    monkeypatch.setattr(shared_block, "create_memory", create_unsealed)
    with pytest.raises(ClusterError, match=r"^trainer \d shares memory .*not sealed"):
        at_once(shown, joined(2), [b"a", b"b"])


@needs_root
def test_a_peer_of_another_user_does_not_block_members() -> None:
    with ExitStack() as stack:
        parts = joined_after(lambda address, _: stack.enter_context(connected_as_another_user(address)))
        assert at_once(shown, parts, [b"a", b"b"]) == [[b"a", b"b"]] * 2


def test_all_descriptors_are_closed() -> None:
    def descriptors() -> set[str]:
        return {name for name in os.listdir("/proc/self/fd") if "memfd:hybrid" in _target(name)}

    before = descriptors()
    parts = joined(2)
    at_once(shown, parts, [b"a" * 10_000] * 2)
    parts[0].slot(1_000_000)  # which the other is never shown
    assert len(descriptors() - before) > 4
    del parts
    assert descriptors() - before == set()


def _target(descriptor: str) -> str:
    link = Path("/proc/self/fd") / descriptor
    return os.readlink(link) if link.is_symlink() else ""
