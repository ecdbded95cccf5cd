"""The memory that a process may still allocate: of its host, and of its control groups. Without torch."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_ROOT = Path("/")
# Files of a control group by version: limit, usage, and the usage that the kernel gives up first.
_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def boot_id() -> str:
    """Return an id of the running kernel; names of hosts need not be unique."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that this process may still allocate; see :func:`free_memory`."""
    return min(free_memory(root).values())


def free_memory(root: Path = _ROOT) -> dict[str, int]:
    """Return the free bytes of the host, and of each control group that limits this process.

    The keys are ids that are the same in all processes with this limit, also in containers.

    Args:
        root: folder with proc and the mounted control groups.
    """
    boot = boot_id()
    free = {boot: int(psutil.virtual_memory().available)}
    for group, version in memory_groups(root):
        limit, usage, reclaimable = _FILES[version]
        with suppress(OSError, ValueError):  # the top group has no limit, others may have "max"
            most = int((group / limit).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / usage).read_text()) - int(stat.get(reclaimable, 0))
            status = group.stat()
            free[f"{boot} {status.st_dev} {status.st_ino}"] = max(0, most - used)
    return free


def memory_groups(root: Path = _ROOT) -> Iterator[tuple[Path, str]]:
    """Yield folder and version, a key of ``_FILES``, of the control group of this process, and of all above.

    Slurm and systemd start processes in groups below the mounted one. A container may see few of the groups.
    """
    paths = {}  # of this process in the hierarchy of each version
    with suppress(FileNotFoundError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                paths["cgroup2"] = path
            elif "memory" in controllers.split(","):
                paths["cgroup"] = path
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            _, _, _, top, mounted, *_, version, _, options = line.split(" ")
            if version not in paths or (version == "cgroup" and "memory" not in options.split(",")):
                continue
            below = Path(os.path.relpath(paths[version], top))
            mount = root / mounted.lstrip("/")
            if ".." in below.parts or not (mount / below).is_dir():  # the group is outside what is mounted
                below = Path()
            yield from ((mount / each, version) for each in (below, *below.parents))
