"""Memory for large tables."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


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
