"""Buffers for repeated copies, such as those of tables for checkpoints."""

import mmap
import weakref
from collections import defaultdict
from contextlib import suppress

import torch
from torch import Tensor

from hybrid.primitives.huge_pages import large_pages


class ReusedBuffers:
    """Copies tensors into buffers that are kept for the next tensor of the same size.

    The first write to new memory costs more than a copy: the system clears each page, and the host of a
    virtual machine may have to find one. The system may take back an unused buffer (``MADV_FREE``), and
    counts it as free memory.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[mmap.mmap]] = defaultdict(list)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a contiguous tensor of the CPU."""
        if not tensor.nbytes:
            return tensor.clone()
        spare = self._spare[tensor.nbytes]
        buffer = spare.pop() if spare else large_pages(tensor.nbytes)
        view = memoryview(buffer)  # lives as long as the copy and its views
        weakref.finalize(view, self._keep, buffer).atexit = False
        return torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)

    def _keep(self, buffer: mmap.mmap) -> None:
        if hasattr(mmap, "MADV_FREE"):
            with suppress(OSError):  # a kernel without it keeps the memory
                buffer.madvise(mmap.MADV_FREE)
        self._spare[len(buffer)].append(buffer)
