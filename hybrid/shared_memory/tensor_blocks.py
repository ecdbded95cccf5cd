"""Transfer of large tensors between two roles on one host, in memory that only these two processes map.

::

    writer                                       reader
    ──────                                       ──────
    copies tensors into a free block   ───────►  uses the tensors in place
                 (a message names the block)
    frees the block                    ◄───────  deletes the last of these tensors
                                 (the next message back names the block)

The bytes are copied once, instead of encrypted, sent, received and decrypted. The memory has no name: its
descriptor is sent over a Unix socket, and the kernel frees the memory when the last process closes it. Each
block starts at the lowest free position, because pages that were ever written stay allocated.
"""

import fcntl
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from hybrid.primitives.available_memory import boot_id
from hybrid.security.message_signature import memory_of

MIN_BLOCK_BYTES = 1 << 14  # encrypting fewer bytes is as fast as using a block
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int32, torch.int64, torch.uint8, torch.bool, torch.int16),
)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_ALIGNMENT = 64
_MIN_TORCH_COPY_BYTES = 1 << 20  # torch copies without the GIL
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

# For each tensor: the index of its dtype in ``DTYPES``, and its shape.
Layout: TypeAlias = Sequence[tuple[int, Sequence[int]]]


def network_id() -> str:
    """Return an id of host and network namespace. Processes with equal ids can connect by loopback."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"


def host_id() -> str:
    """Return an id of host, network namespace and user. Processes with equal ids can share memory."""
    return f"{network_id()} {os.geteuid()}"


class BlockWriter:
    """Memory into which this process copies tensors. One thread at a time may write; any thread may free."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._ends: dict[int, int] = {}  # by start of each block that is in use
        self._released: deque[int] = deque()

    def write(self, tensors: Sequence[Tensor]) -> int | None:
        """Copy tensors into a free block, and return its start; None if tensors are small or do not fit."""
        length = sum(align(tensor.nbytes) for tensor in tensors)
        if length < MIN_BLOCK_BYTES:
            return None
        while self._released:
            self._ends.pop(self._released.popleft(), None)
        start = 0
        for first, end in sorted(self._ends.items()):
            if first - start >= length:
                break
            start = end
        if start + length > len(self._memory):
            return None
        self._ends[start] = start + length
        write_tensors(tensors, self._memory, start)
        return start

    def free(self, starts: Iterable[int]) -> None:
        """Free the blocks at ``starts``, whose tensors the other process has deleted."""
        self._released.extend(starts)


class BlockReader:
    """Memory into which the other process copies tensors. Any thread may call the methods."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._in_use: dict[int, weakref.ref[memoryview]] = {}
        self._released: deque[int] = deque()

    def read(self, start: int, layout: Layout) -> list[Tensor]:
        """Return the tensors of the block at ``start``. The block is released when all of them are deleted.

        Errors are as in :func:`read_tensors`.
        """
        view = self._memory[:]  # only the tensors refer to this object
        self._in_use[start] = weakref.ref(view, partial(self._release, start))
        return read_tensors(view, start, layout)

    def take_released(self) -> list[int]:
        """Return the starts of the blocks that were released since the last call."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def _release(self, start: int, _: object) -> None:
        del self._in_use[start]
        self._released.append(start)


class MemoryPair:
    """The shared memory of a connection: each end writes one half and reads the other.

    Args:
        memory: ``NUM_BYTES`` of memory that both ends map.
        writes_first_half: whether this end writes the first half.
    """

    NUM_BYTES: ClassVar = 2 << 30  # tensors that do not fit into a half are sent in the frame

    def __init__(self, memory: memoryview, writes_first_half: bool) -> None:
        middle = len(memory) // 2
        first, second = memory[:middle], memory[middle:]
        self.writer = BlockWriter(first if writes_first_half else second)
        self.reader = BlockReader(second if writes_first_half else first)

    @classmethod
    def map(cls, descriptor: int, writes_first_half: bool) -> "MemoryPair":
        """Map the memory of ``descriptor``, which the caller closes. Errors are as in :func:`map_memory`."""
        return cls(memoryview(map_memory(descriptor, cls.NUM_BYTES)), writes_first_half)


def create_memory(num_bytes: int) -> int:
    """Create anonymous shared memory of a size that no process can change; return its descriptor."""
    descriptor = os.memfd_create("hybrid", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    return descriptor


def map_memory(descriptor: int, num_bytes: int = 0) -> mmap.mmap:
    """Map the first ``num_bytes`` of memory that :func:`create_memory` created in any process; 0 for all.

    Raises:
        ValueError: the memory is smaller, or is not sealed, so that a process could truncate it.
        OSError: the descriptor does not refer to memory.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its size is not sealed")
    return mmap.mmap(descriptor, num_bytes)


def layout_of(tensors: Iterable[Tensor]) -> Layout:
    """Return the dtype (its index in ``DTYPES``) and the shape of each tensor."""
    return [(_DTYPE_NUMBERS[each.dtype], tuple(each.shape)) for each in tensors]


def write_tensors(tensors: Sequence[Tensor], memory: memoryview, start: int) -> None:
    """Copy tensors into ``memory`` from byte ``start``, a multiple of 64."""
    for tensor in tensors:
        if tensor.nbytes >= _MIN_TORCH_COPY_BYTES:
            copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            copy.view(tensor.shape).copy_(tensor.detach())
        else:
            contiguous = tensor.contiguous()  # keeps the memory that the views refer to
            for segment in memory_of(contiguous):
                memory[start : start + len(segment)] = segment
        start += align(tensor.nbytes)


def read_tensors(memory: memoryview, start: int, layout: Layout) -> list[Tensor]:
    """Return tensors that share the bytes of ``memory`` from ``start`` on, and keep ``memory`` alive.

    Raises:
        ValueError: a tensor is not within the memory.
        IndexError: the number of a dtype is unknown.
    """
    tensors = []
    for number, shape in layout:
        dtype, count = DTYPES[number], math.prod(shape)
        flat = torch.empty(0, dtype=dtype)
        if count:  # frombuffer rejects an empty tensor
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        tensors.append(flat.view(tuple(shape)))
        start += align(count * dtype.itemsize)
    return tensors


def align(position: int) -> int:
    """Round a byte position up to the next position at which a tensor may start."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT
