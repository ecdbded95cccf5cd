"""Memory in huge pages, for large tables."""

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

_MAP_NORESERVE = 0x4000  # which mmap has from Python 3.13 on


def zeros_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros of ``shape``, in pages of 2 MiB if the system provides them.

    Rows are read and written at random. With pages of 4 KiB, nearly every access misses the TLB. Memory is
    allocated when it is first written to.
    """
    return _zeros(shape, dtype, large_pages)


def reserved_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros as :func:`zeros_in_large_pages`; they may exceed the memory of the system."""
    return _zeros(shape, dtype, reserved_pages)


def _zeros(shape: Sequence[int], dtype: torch.dtype, pages: Callable[[int], mmap.mmap]) -> Tensor:
    size = math.prod(shape)
    if not size:
        return torch.zeros(*shape, dtype=dtype)
    return torch.frombuffer(pages(size * dtype.itemsize), dtype=dtype).view(*shape)


def reserved_pages(num_bytes: int) -> mmap.mmap:
    """Return memory as :func:`large_pages`; it may exceed the memory of the system."""
    return large_pages(num_bytes, _MAP_NORESERVE)


def large_pages(num_bytes: int, flag: int = 0) -> mmap.mmap:
    """Return zeroed memory, in pages of 2 MiB if possible; it is allocated when it is first written to."""
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flag)
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
