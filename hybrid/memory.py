"""How much memory a process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Free memory of the host, or of the container where that has less left (cgroup v2)."""
    available = int(psutil.virtual_memory().available)
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        used = int((cgroup / "memory.current").read_text()) - _reclaimable_bytes(cgroup / "memory.stat")
        available = min(available, max(0, int(text) - used))
    return available


def _reclaimable_bytes(stat: Path) -> int:
    """Cached file pages that the kernel drops first; ``memory.current`` counts them as used."""
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields["inactive_file"])
