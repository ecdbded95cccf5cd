"""Tensors between two roles of one host: in memory that both ends of a connection have, and nobody else.

::

    lender                                       borrower
    ──────                                       ────────
    copies tensors into a free block   ───────►  takes them for its own, where they lie
                      the frame says where
    the block is free again            ◄───────  lets go of the last of them
                      the next frame back says so

Their bytes are moved once, where a socket moves them twice, and sealing and opening them twice more. The
memory has no name: its descriptor goes over a connection within the host, and it ends with the last process
that has it. Of its ``NUM_BYTES`` the system gives only what was ever lent: blocks begin as low as they can.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from hybrid.transport.shared_memory.tensor_layout import (
    Described,
    create_memory,
    map_memory,
    num_bytes,
    tensors_in,
    write,
)

NUM_BYTES = 1 << 30  # of each direction; what does not fit goes by the socket
LEAST_BYTES = 1 << 14  # less is sealed in the time that a block takes


def own_network() -> str:
    """What processes have in common that reach each other by loopback: machine, and names of sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def own_host() -> str:
    """What processes have in common that can share memory: the same, and the user."""
    return f"{own_network()} {os.geteuid()}"


class Block(NamedTuple):
    """A part of the memory.

    Attributes:
        number: counted by the lender.
        start: its first byte.
    """

    number: int
    start: int


class LentMemory:
    """What one end copies for the other. One thread at a time lends; any takes back.

    Attributes:
        descriptor: of the memory, which is closed with :meth:`close` once the other end has it.
    """

    def __init__(self) -> None:
        self.descriptor = create_memory(NUM_BYTES)
        self._memory = memoryview(mmap.mmap(self.descriptor, NUM_BYTES))
        self._lent: dict[int, tuple[int, int]] = {}  # where each block starts and ends
        self._returned: deque[int] = deque()
        self._count = 0

    def close(self) -> None:
        """Close the descriptor; the memory stays with those who have it."""
        os.close(self.descriptor)

    def lend(self, tensors: Sequence[Tensor], shapes: Described) -> Block | None:
        """Copy tensors into a block; None where there is no room for one, or they are few bytes."""
        if (length := num_bytes(shapes)) < LEAST_BYTES:
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
        write(tensors, self._memory, start)
        return Block(self._count, start)

    def take_back(self, numbers: Iterable[int]) -> None:
        """The other end has let go of blocks."""
        self._returned.extend(numbers)


class BorrowedMemory:
    """What the other end has copied for this one. For any threads.

    Args:
        descriptor: of the memory; the caller's to close.

    Raises:
        OSError, ValueError: see :func:`map_memory`.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(map_memory(descriptor))
        self._borrowed: dict[int, weakref.ref[memoryview]] = {}
        self._returned: deque[int] = deque()

    def tensors(self, block: Block, shapes: Described) -> list[Tensor]:
        """What lies in a block; once nobody has any of it, the block is one of :meth:`returned`.

        Raises:
            ValueError: it is no part of the memory.
        """
        own = self._memory[:]  # which all tensors keep, and nobody else
        self._borrowed[block.number] = weakref.ref(own, partial(self._give_back, block.number))
        return tensors_in(own, block.start, shapes)

    def returned(self) -> list[int]:
        """The numbers of the blocks that nobody here has any more, each once."""
        found = []
        while self._returned:
            found.append(self._returned.popleft())
        return found

    def _give_back(self, number: int, _: object) -> None:
        del self._borrowed[number]
        self._returned.append(number)


class HostMemory(NamedTuple):
    """Both directions, as one end has them."""

    lent: LentMemory
    borrowed: BorrowedMemory
