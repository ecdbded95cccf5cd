"""CPU time and memory of the processes of a measured system, by role."""

import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

OTHER = "other"
_ROLES = ("master", "trainer", "worker")


def cpu_seconds(root: int) -> dict[str, float]:
    """Return the CPU-seconds of a process and its descendants by role, with those of ended children."""
    used: dict[str, float] = defaultdict(float)
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[_role(process.pid)] += (
                times.user + times.system + times.children_user + times.children_system
            )
    return dict(used)


def memory_bytes(root: int) -> dict[str, float]:
    """Return the mean unshared memory (USS) of the processes of each role."""
    held = defaultdict(list)
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess):
            held[_role(process.pid)].append(process.memory_full_info().uss)
    return {role: statistics.mean(values) for role, values in held.items()}


@contextmanager
def standing_still(root: int) -> Iterator[None]:
    """Suspend a process and its descendants, so that none ends during the measurement."""
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
    """Return the role of a process of this project, by the name of its log, such as trainer-0.log."""
    with suppress(OSError):
        name = os.path.basename(os.readlink(f"/proc/{pid}/fd/2")).partition("-")[0].removesuffix(".log")
        if name in _ROLES:
            return name
    return OTHER
