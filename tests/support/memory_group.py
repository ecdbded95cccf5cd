"""A memory control group of a test, in which the kernel kills a process that exceeds the limit."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.launching.fork_server import is_alive

_HIERARCHY = Path("/sys/fs/cgroup/memory")  # version 1; a group of version 2 with processes has no children
_MORE_BYTES = 8 << 20
_NO_LIMIT = -1


def own_group(pid: int | str = "self") -> Path | None:
    """Return the folder of a process's group; None if such groups are missing or not writable."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = _HIERARCHY / path.lstrip("/")
            return group if os.access(group, os.W_OK) else None
    return None


@contextmanager
def child_group() -> Iterator[Path]:
    """Move this process, and those it starts, into a new group for the length of a ``with`` block."""
    parent = own_group()
    assert parent is not None
    group = parent / f"hybrid-test-{os.getpid()}"
    group.mkdir()
    _join(group)
    try:
        yield group
    finally:
        _join(parent)
        group.rmdir()  # all that was started in it has ended


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def starve(pid: int) -> None:
    """Let the kernel kill a process of this group because it exceeds the memory limit.

    A process of its own sees to it, and that there is enough again: this one may not live so long.
    """
    subprocess.run([sys.executable, __file__, str(pid)], stderr=subprocess.DEVNULL, check=True)


def _starve(pid: int) -> None:
    group = own_group()
    assert group is not None
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    limit = group / "memory.limit_in_bytes"
    most = int((group / "memory.usage_in_bytes").read_text()) + _MORE_BYTES
    limit.write_text(str(most))
    try:
        # The kernel first frees the page cache of the group, which may be large.
        with mmap.mmap(-1, most) as memory:
            for offset in range(0, most, mmap.PAGESIZE):
                memory[offset] = 1
                if not is_alive(pid):  # the next would be another process
                    break
    finally:
        limit.write_text(str(_NO_LIMIT))


if __name__ == "__main__":
    _starve(int(sys.argv[1]))
