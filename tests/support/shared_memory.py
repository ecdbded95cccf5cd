"""Members that share memory, with every one a thread that has its own place in a process group."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from hybrid.transport.shared_memory.shared_slots import SharedSlots

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


def joined(size: int, timeout_seconds: float = SECONDS) -> list[SharedSlots]:
    """The parts of all members, by place."""
    parts = together(size, lambda rank, group: SharedSlots.join(group, rank, True, timeout_seconds))
    assert all(part is not None for part in parts)
    return [part for part in parts if part is not None]


def at_once(work: Callable[..., Result], *arguments: Sequence[Any]) -> list[Result]:
    """What ``work`` gives for the arguments of each, in a thread each."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(work, *arguments))
