"""What the processes of a system under measurement have used: CPU time and memory, by role."""

import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

OTHER = "other"
_ROLES = ("master", "trainer", "worker")


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU-seconds of a process and all below it since their start, by role; children that ended count."""
    used: dict[str, float] = defaultdict(float)
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[_role(process.pid)] += (
                times.user + times.system + times.children_user + times.children_system
            )
    return dict(used)


def memory_bytes(root: int) -> dict[str, float]:
    """Mean over the processes of each role of the memory that a process shares with no other (USS)."""
    held = defaultdict(list)
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess):
            held[_role(process.pid)].append(process.memory_full_info().uss)
    return {role: statistics.mean(values) for role, values in held.items()}


@contextmanager
def standing_still(root: int) -> Iterator[None]:
    """Stop a process and all below it meanwhile, lest they end while they are looked at."""
    stopped = _tree(root)
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _tree(root: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(root)
        return [top, *top.children(recursive=True)]
    return []


def _role(pid: int) -> str:
    """The role that this project's launcher has given to a process: it has a log such as trainer-0.log."""
    with suppress(OSError):
        name = os.path.basename(os.readlink(f"/proc/{pid}/fd/2")).partition("-")[0].removesuffix(".log")
        if name in _ROLES:
            return name
    return OTHER
