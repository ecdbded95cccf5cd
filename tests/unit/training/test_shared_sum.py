"""Sums in shared memory, with every trainer a thread that has its own place in a process group."""

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from support.users import connected_as_another_user, needs_root

from hybrid.errors import ClusterError
from hybrid.training import shared_sum
from hybrid.training.shared_sum import MOST_TRAINERS, SharedSum

CPU = torch.device("cpu")
SECONDS = 10.0
Result = TypeVar("Result")


def together(size: int, work: Callable[[int, dist.ProcessGroup], Result]) -> list[Result]:
    """What ``work(rank, group)`` gives on every rank of a group of threads."""
    store = dist.HashStore()

    def run(rank: int) -> Result:
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=SECONDS))
        return work(rank, cast(dist.ProcessGroup, group))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def joined(size: int) -> list[SharedSum]:
    """The parts of a group, one a rank."""
    parts = together(size, lambda _, group: SharedSum.join(group, CPU, SECONDS))
    assert all(part is not None for part in parts)
    return [part for part in parts if part is not None]


def at_once(parts: list[SharedSum], tensors: list[torch.Tensor]) -> None:
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(SharedSum.sum_, parts, tensors))


@pytest.mark.parametrize("size", [2, 3, MOST_TRAINERS])
def test_the_sum_is_that_of_the_ranks_in_their_order_on_each(size: int) -> None:
    parts = joined(size)
    generator = torch.Generator().manual_seed(0)
    for num in (1, 1000, 7, 100_000, 1000):  # slots grow, and are used again
        tensors = [torch.rand(num, generator=generator) for _ in range(size)]
        expected = tensors[0] + tensors[1]
        for tensor in tensors[2:]:
            expected = expected + tensor
        at_once(parts, tensors)
        assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_many_sums_in_a_row_never_meet_a_slot_that_is_still_read() -> None:
    parts = joined(3)

    def train(rank: int) -> None:
        for step in range(300):
            numbers = torch.full((500,), float((rank + 1) * step), dtype=torch.float64)
            parts[rank].sum_(numbers)
            assert (numbers == 6.0 * step).all()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_type_of_gradients(dtype: torch.dtype) -> None:
    tensors = [torch.ones(5, dtype=dtype), torch.full((5,), 2.0, dtype=dtype)]
    at_once(joined(2), tensors)
    assert all(torch.equal(tensor, torch.full((5,), 3.0, dtype=dtype)) for tensor in tensors)


def test_a_trainer_that_is_gone_is_named_at_once() -> None:
    first, second = joined(2)
    for peer in second._peers.values():
        peer.close()
    with pytest.raises(ClusterError, match="trainer 1 of the group is gone"):
        first.sum_(torch.ones(3))


def test_a_trainer_that_does_not_come_is_named_in_time() -> None:
    parts = together(2, lambda _, group: SharedSum.join(group, CPU, 0.2))
    assert parts[0] is not None
    with pytest.raises(ClusterError, match=r"trainer 1 of the group: no gradients in cluster\.rpc_timeout"):
        parts[0].sum_(torch.ones(3))


def test_one_trainer_too_many_or_a_gpu_leave_it_to_the_group() -> None:
    assert together(1, lambda _, group: SharedSum.join(group, CPU, SECONDS)) == [None]
    assert together(
        2, lambda rank, group: SharedSum.join(group, [CPU, torch.device("cuda")][rank], SECONDS)
    ) == [
        None,
        None,
    ]
    size = MOST_TRAINERS + 1
    assert together(size, lambda _, group: SharedSum.join(group, CPU, SECONDS)) == [None] * size


def test_trainers_of_two_hosts_leave_it_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = threading.local()

    def join(rank: int, group: dist.ProcessGroup) -> SharedSum | None:
        hosts.name = f"host {rank // 2}"
        return SharedSum.join(group, CPU, SECONDS)

    monkeypatch.setattr(shared_sum, "_place", lambda _: hosts.name)
    assert together(3, join) == [None] * 3


def test_trainers_of_two_containers_leave_it_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host, but with networks of their own, and so with names of sockets of their own."""
    containers, readlink = threading.local(), os.readlink

    def read(path: str) -> str:
        return str(containers.network) if path == "/proc/self/ns/net" else readlink(path)

    def join(rank: int, group: dist.ProcessGroup) -> SharedSum | None:
        containers.network = f"net:[{rank}]"
        return SharedSum.join(group, CPU, SECONDS)

    monkeypatch.setattr(os, "readlink", read)
    assert together(2, join) == [None] * 2


def before_the_exchange(
    monkeypatch: pytest.MonkeyPatch, come: Callable[[dict[str, str | None]], None]
) -> None:
    """Have strangers come once there is somewhere to: they are told the card of the first member."""
    exchange = shared_sum._exchange

    def exchange_after_them(card: dict[str, str | None], group: dist.ProcessGroup) -> list[dict[str, str]]:
        if group.rank() == 0:
            come(card)
        return exchange(card, group)

    monkeypatch.setattr(shared_sum, "_exchange", exchange_after_them)


@pytest.mark.parametrize(
    "hellos",
    [
        lambda _: [b"", bytes([1]) + b"x" * 16, None],
        lambda token: [bytes([0]) + token, bytes([2]) + token],
    ],
    ids=["silent, wrong, closed", "ranks that are not expected"],
)
def test_strangers_are_sent_away(
    hellos: Callable[[bytes], list[bytes | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come before the trainers' own connections."""
    strangers = []

    def come(card: dict[str, str | None]) -> None:
        for words in hellos(bytes.fromhex(str(card["token"]))):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.connect(bytes.fromhex(str(card["name"])))
            if words is None:
                stranger.close()
            else:
                stranger.sendall(words)
            strangers.append(stranger)

    before_the_exchange(monkeypatch, come)
    monkeypatch.setattr(shared_sum, "_HELLO_SECONDS", 0.1)
    tensors = [torch.ones(4), torch.ones(4)]
    at_once(joined(2), tensors)
    assert torch.equal(tensors[0], torch.full((4,), 2.0))
    for stranger in strangers:
        stranger.close()


@needs_root
def test_a_stranger_of_another_user_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:

        def come(card: dict[str, str | None]) -> None:
            stack.enter_context(connected_as_another_user(bytes.fromhex(str(card["name"]))))

        before_the_exchange(monkeypatch, come)
        monkeypatch.setattr(shared_sum, "_HELLO_SECONDS", 1000.0)
        tensors = [torch.ones(4), torch.ones(4)]
        at_once(joined(2), tensors)
    assert torch.equal(tensors[0], torch.full((4,), 2.0))


def test_nothing_is_left_open() -> None:
    def descriptors() -> set[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return {os.readlink(link) for link in links if link.is_symlink()}

    joined(2)  # what gloo keeps for good
    before = descriptors()
    parts = joined(2)
    at_once(parts, [torch.ones(5), torch.ones(5)])
    del parts
    left = {name for name in descriptors() - before if "memfd" in name}
    assert left == set()
