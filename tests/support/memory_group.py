"""A memory control group of a test's own, in which the kernel ends a process for want of memory."""

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
    """The group of a process, where groups of this kind are and may be changed."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = _HIERARCHY / path.lstrip("/")
            return group if os.access(group, os.W_OK) else None
    return None


@contextmanager
def child_group() -> Iterator[Path]:
    """A new group, to which this process and what it starts belong for the length of a ``with`` block."""
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
    """Have the kernel end a process of this one's group for want of memory.

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
        with mmap.mmap(
            -1, most
        ) as memory:  # what the group has read of files is let go of first, and may be much
            for offset in range(0, most, mmap.PAGESIZE):
                memory[offset] = 1
                if not is_alive(pid):  # the next would be another process
                    break
    finally:
        limit.write_text(str(_NO_LIMIT))


if __name__ == "__main__":
    _starve(int(sys.argv[1]))
