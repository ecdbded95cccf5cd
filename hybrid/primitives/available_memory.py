"""The memory that a process may still allocate. This module does not import torch."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the free bytes of the host, or of its container (cgroup v2) if those are fewer."""
    available = int(psutil.virtual_memory().available)
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Cached file pages, which the kernel drops first, count as used.
        used = int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"])
        available = min(available, max(0, int(text) - used))
    return available
