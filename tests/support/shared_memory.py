"""Trainers that share memory; each is a thread with its own rank in a process group."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybrid.shared_memory.shared_slots import SharedSlots

SECONDS = 10.0
SLOT_BYTES = 1 << 20
Result = TypeVar("Result")


def together(size: int, work: Callable[[int, dist.ProcessGroup], Result]) -> list[Result]:
    """Return the results of ``work(rank, group)``, by rank of a group of threads."""
    store = dist.HashStore()

    def run(rank: int) -> Result:
        kind = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=SECONDS))
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, backend)
        return work(rank, group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def join(
    rank: int, group: dist.ProcessGroup, may_share: bool = True, timeout_seconds: float = SECONDS
) -> SharedSlots | None:
    """Join a group as its trainer ``rank``."""
    return SharedSlots.join(group, rank, SLOT_BYTES, may_share, timeout_seconds)


def joined(size: int, timeout_seconds: float = SECONDS) -> list[SharedSlots]:
    """Return the members of a group, by rank."""
    members = together(size, lambda rank, group: join(rank, group, timeout_seconds=timeout_seconds))
    assert all(member is not None for member in members)
    return [member for member in members if member is not None]


def at_once(work: Callable[..., Result], *arguments: Sequence[Any]) -> list[Result]:
    """Call ``work`` with the arguments of each member, in a thread each, and return the results."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(work, *arguments))
