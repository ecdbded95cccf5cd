"""Free memory of the host and of this process's control groups. This module does not import torch."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_ROOT = Path("/")
# Files with the limit and the usage of a control group of version 2 and of version 1, and the entry of
# memory.stat for cached pages that the kernel frees on demand.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def boot_id() -> str:
    """Return the id of this boot of the host. No other host has this id, even one with the same name."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return how many bytes this process can allocate: the minimum of ``free_memory(root).values()``."""
    return min(free_memory(root).values())


def free_memory(root: Path = _ROOT) -> dict[str, int]:
    """Return the free bytes of the host, and of each control group that limits this process.

    The keys are ids of the host and of the groups. All processes of a host use the same ids, even in
    different containers. Cached file pages that the kernel frees on demand count as free.

    Args:
        root: folder with the folder ``proc`` and the mounted control groups.
    """
    free = {boot_id(): int(psutil.virtual_memory().available)}
    for group in memory_groups(root):
        for limit, usage, reclaimable in _FILES:
            with suppress(OSError, ValueError):  # no file: another version; the text "max": no limit
                most = int((group / limit).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / usage).read_text()) - int(stat.get(reclaimable, 0))
                status = group.stat()
                free[f"{boot_id()} {status.st_dev} {status.st_ino}"] = max(0, most - used)
    return free


def memory_groups(root: Path = _ROOT) -> Iterator[Path]:
    """Yield the folders of the nested control groups that contain this process, innermost first.

    A group may have no memory limit. A container may hide outer groups. ``root`` is as in free_memory.
    """
    paths = {}  # of this process, by type of file system
    with suppress(FileNotFoundError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                paths["cgroup2" if number == "0" else "cgroup"] = path
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            _, _, _, top, mounted, *_, kind, _, options = line.split(" ")
            if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
                below = Path(os.path.relpath(paths.get(kind, "/"), top))
                mount = root / mounted.lstrip("/")
                if ".." in below.parts or not (mount / below).is_dir():  # the group is not visible here
                    below = Path()
                yield from (mount / each for each in (below, *below.parents))
