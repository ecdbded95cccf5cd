"""Memory in huge pages, for large tables."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_MAP_NORESERVE = 0x4000  # a constant of mmap from Python 3.13 on


def zeros_in_large_pages(shape: Sequence[int], dtype: torch.dtype, is_overcommitted: bool = False) -> Tensor:
    """Return zeros in pages of 2 MiB if possible; arguments and errors are as in :func:`large_pages`.

    Rows of tables are accessed at random. With pages of 4 KiB, nearly every access misses the TLB.
    """
    size = math.prod(shape)
    if not size:
        return torch.zeros(*shape, dtype=dtype)
    return torch.frombuffer(large_pages(size * dtype.itemsize, is_overcommitted), dtype=dtype).view(*shape)


def large_pages(num_bytes: int, is_overcommitted: bool = False) -> mmap.mmap:
    """Map zeroed memory, in pages of 2 MiB if possible. The kernel allocates a page at its first write.

    Args:
        is_overcommitted: allow more bytes than are free, for memory that stays mostly unwritten.

    Raises:
        OSError: the kernel rejects the mapping.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if is_overcommitted else 0)
    buffer = mmap.mmap(-1, num_bytes, flags=flags)
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
