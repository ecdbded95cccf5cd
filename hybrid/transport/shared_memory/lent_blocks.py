"""Large tensors between two roles of one host, in memory that only the two ends of a connection have.

::

    lender                                       borrower
    ──────                                       ────────
    copies tensors into a free block   ───────►  uses them in place
                 (a frame names the block)
    frees the block                    ◄───────  drops the last of them
                                 (the next frame back names the block)

The bytes are copied once, instead of sealed, sent, received and opened. The memory has no name: its
descriptor is sent over a Unix socket, and it ends with the last process that has it. The system provides only
the pages of ``NUM_BYTES`` that were used: each block starts at the lowest free position.
"""

import fcntl
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybrid.security.message_signature import is_contiguous, memory_of

NUM_BYTES = 1 << 30  # of each direction; what does not fit is sent
LEAST_BYTES = 1 << 14  # fewer are sealed in the time that a block takes
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int32, torch.int64, torch.uint8, torch.bool),
)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_ALIGNMENT = 64
_MANY_BYTES = 1 << 20  # copied by torch, which lets other threads run meanwhile
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

# Of each tensor, the number of its dtype in ``DTYPES``, and its shape.
Layout: TypeAlias = Sequence[tuple[int, Sequence[int]]]


def own_network() -> str:
    """Return the same text for processes that reach each other by loopback: host and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def own_host() -> str:
    """Return the same text for processes that can share memory: host, network namespace and user."""
    return f"{own_network()} {os.geteuid()}"


class Block(NamedTuple):
    """A range of the memory.

    Attributes:
        number: counted by the lender.
        start: its first byte.
    """

    number: int
    start: int


class LentMemory:
    """The memory into which one end copies tensors. One thread at a time lends; any thread frees.

    Attributes:
        descriptor: of the memory; valid until :meth:`close`.
    """

    def __init__(self) -> None:
        self.descriptor = create_memory(NUM_BYTES)
        self._memory = memoryview(mmap.mmap(self.descriptor, NUM_BYTES))
        self._lent: dict[int, tuple[int, int]] = {}  # start and end of each block
        self._returned: deque[int] = deque()
        self._count = 0

    def close(self) -> None:
        """Close the descriptor; the memory stays with the processes that have mapped it."""
        os.close(self.descriptor)

    def lend(self, tensors: Sequence[Tensor], layout: Layout) -> Block | None:
        """Copy tensors into a block; None if there is no room, or they are small."""
        if (length := num_bytes(layout)) < LEAST_BYTES:
            return None
        while self._returned:
            self._lent.pop(self._returned.popleft(), None)
        start = 0
        for first, end in sorted(self._lent.values()):
            if first - start >= length:
                break
            start = end
        if start + length > NUM_BYTES:
            return None
        self._count += 1
        self._lent[self._count] = (start, start + length)
        write_tensors(tensors, self._memory, start)
        return Block(self._count, start)

    def free(self, numbers: Iterable[int]) -> None:
        """Free blocks that the other end has returned."""
        self._returned.extend(numbers)


class BorrowedMemory:
    """The memory into which the other end copies tensors; for any threads.

    Args:
        descriptor: of the memory; the caller closes it.

    Raises:
        OSError, ValueError: see :func:`map_memory`.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(map_memory(descriptor, NUM_BYTES))
        self._borrowed: dict[int, weakref.ref[memoryview]] = {}
        self._returned: deque[int] = deque()

    def tensors(self, block: Block, layout: Layout) -> list[Tensor]:
        """Return the tensors of a block; :meth:`returned` names it once none of them is in use.

        Raises:
            ValueError: the block is not within the memory.
        """
        view = self._memory[:]  # only the tensors keep it
        self._borrowed[block.number] = weakref.ref(view, partial(self._return, block.number))
        return read_tensors(view, block.start, layout)

    def returned(self) -> list[int]:
        """Return the numbers of the blocks that are no longer in use, each once."""
        numbers = []
        while self._returned:
            numbers.append(self._returned.popleft())
        return numbers

    def _return(self, number: int, _: object) -> None:
        del self._borrowed[number]
        self._returned.append(number)


class MemoryPair(NamedTuple):
    """The memory of both directions of a connection, at one end."""

    lent: LentMemory
    borrowed: BorrowedMemory


def create_memory(num_bytes: int) -> int:
    """Return the descriptor of anonymous memory whose size nobody can change any more."""
    descriptor = os.memfd_create("hybrid", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    return descriptor


def map_memory(descriptor: int, num_bytes: int = 0) -> mmap.mmap:
    """Map memory that another process created by :func:`create_memory`; all of it by default.

    Raises:
        ValueError: the memory is smaller, or its owner could truncate it: an access would end in SIGBUS.
        OSError: the descriptor is not one of memory.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its size is not sealed")
    return mmap.mmap(descriptor, num_bytes)


def layout_of(tensors: Iterable[Tensor]) -> Layout:
    """Return dtypes and shapes, in plain values."""
    return [(_DTYPE_NUMBERS[each.dtype], tuple(each.shape)) for each in tensors]


def num_bytes(layout: Layout) -> int:
    """Return the size of tensors in memory, from a position that is a multiple of 64 bytes."""
    return sum(align(math.prod(shape) * DTYPES[number].itemsize) for number, shape in layout)


def write_tensors(tensors: Sequence[Tensor], memory: memoryview, start: int) -> None:
    """Copy tensors into ``memory``, from byte ``start`` on."""
    for tensor in tensors:
        if tensor.nbytes >= _MANY_BYTES:
            copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            copy.view(tensor.shape).copy_(tensor.detach())
        else:
            contiguous = tensor if is_contiguous(tensor) else tensor.contiguous()
            for segment in memory_of(contiguous):
                memory[start : start + len(segment)] = segment
        start += align(tensor.nbytes)


def read_tensors(memory: memoryview, start: int, layout: Layout) -> list[Tensor]:
    """Return tensors that lie in ``memory`` from byte ``start`` on, and keep it.

    Raises:
        ValueError: one is not within the memory.
    """
    tensors = []
    for number, shape in layout:
        dtype, count = DTYPES[number], math.prod(shape)
        if count:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        else:  # frombuffer rejects an empty tensor
            flat = torch.empty(0, dtype=dtype)
        tensors.append(flat.view(tuple(shape)))
        start += align(count * dtype.itemsize)
    return tensors


def align(position: int) -> int:
    """Return the next position at which a tensor may start."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT
