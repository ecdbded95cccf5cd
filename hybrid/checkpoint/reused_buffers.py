"""Memory for copies that are made time and again, such as those of tables for checkpoints."""

import mmap
import weakref
from collections import defaultdict
from contextlib import suppress

import torch
from torch import Tensor

from hybrid.primitives.huge_pages import large_pages


class ReusedBuffers:
    """Copies tensors into memory that it keeps when no tensor lies in it any more, for the next of that size.

    Writing to memory for the first time costs more than a copy: the system clears each page, and in a
    virtual machine its host may have to find one. Memory that is kept the system may take back where it
    runs short, and it counts it as free (``MADV_FREE``).
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[mmap.mmap]] = defaultdict(list)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a contiguous tensor of the CPU."""
        if not tensor.nbytes:
            return tensor.clone()
        spare = self._spare[tensor.nbytes]
        buffer = spare.pop() if spare else large_pages(tensor.nbytes)
        view = memoryview(buffer)  # lives as long as the copy and all views of it
        weakref.finalize(view, self._keep, buffer).atexit = False
        return torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)

    def _keep(self, buffer: mmap.mmap) -> None:
        if hasattr(mmap, "MADV_FREE"):
            with suppress(OSError):  # a kernel without it: the memory just stays
                buffer.madvise(mmap.MADV_FREE)
        self._spare[len(buffer)].append(buffer)
