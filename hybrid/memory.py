"""How much memory a process may still take, and memory for large tables."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

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


def zeros_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of ``shape``, in pages of 2 MiB where the system has them to give.

    Rows are read and written at random, and with pages of 4 KiB nearly each costs a walk through page
    tables. Memory is taken as it is first written to.
    """
    size = math.prod(shape)
    if not size:
        return torch.zeros(*shape, dtype=dtype)
    return torch.frombuffer(large_pages(size * dtype.itemsize), dtype=dtype).view(*shape)


def large_pages(num_bytes: int) -> mmap.mmap:
    """Memory full of zeros, as :func:`zeros_in_large_pages` has it."""
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
