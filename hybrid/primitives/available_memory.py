"""How much memory a process may still take. Free of torch."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Free memory of the host, or of the container where that has less left (cgroup v2)."""
    available = int(psutil.virtual_memory().available)
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Cached file pages, which the kernel drops first, count as used.
        used = int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"])
        available = min(available, max(0, int(text) - used))
    return available
