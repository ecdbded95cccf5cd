"""Whether the kernel kills processes since memory runs out: the only trace that it leaves a user."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed so far, in this one's control group, else on this machine.

    Args:
        root: where proc and sys are.
    """
    for path in _counters(root):
        with suppress(OSError):  # not this kind of control group, or not to be seen from inside a container
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def _counters(root: Path) -> Iterator[Path]:
    """Files that may have a line ``oom_kill N``; see cgroups(7), and proc(5) for the last."""
    groups = root / "sys/fs/cgroup"
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"
    yield groups / "memory.events"  # a container may see its own group as the root
    yield groups / "memory/memory.oom_control"
    yield root / "proc/vmstat"
