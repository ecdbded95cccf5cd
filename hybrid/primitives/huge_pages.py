"""Memory in huge pages, for large tables."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


def zeros_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros of ``shape``, in pages of 2 MiB if the system provides them.

    Rows are read and written at random. With pages of 4 KiB, nearly every access misses the TLB. Memory is
    allocated when it is first written to.
    """
    size = math.prod(shape)
    if not size:
        return torch.zeros(*shape, dtype=dtype)
    return torch.frombuffer(large_pages(size * dtype.itemsize), dtype=dtype).view(*shape)


def large_pages(num_bytes: int) -> mmap.mmap:
    """Return memory full of zeros; see :func:`zeros_in_large_pages`."""
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
