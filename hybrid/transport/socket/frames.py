"""Messages as bytes on one connection: plain values and tensors, sealed.

::

    length of the sealed head (4 bytes), of all that follows (8)
    sealed head        a pickle of numbers, text, and lists of such: nothing that has a name can be in it
    sealed tensors     the bytes of each, in parts where it is huge; nothing where they lie in memory that
                       both ends have (host_memory.py)

Tensors are sealed from where they lie, and opened into the memory in which they stay. The lengths are not
sealed; where they are wrong, what follows cannot be opened.
"""

import io
import math
import pickle
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.errors import ClusterError
from hybrid.security.message_signature import is_contiguous, memory_of
from hybrid.security.rejected_messages import PlainUnpickler, RejectedMessage
from hybrid.security.sealed_stream import TAG_BYTES, Direction
from hybrid.transport.shared_memory.tensor_layout import DTYPES, Described, described
from hybrid.transport.socket.lent_blocks import Block, HostMemory

_LENGTHS = struct.Struct("<IQ")
_FIRST_BYTES = 1 << 16  # of a buffer, which grows


class Kind(IntEnum):
    """What a message is."""

    CALL = 0  # its value: the name of a function, and what it is called with besides tensors
    ANSWER = 1
    FAILED = 2  # its value: the words of hybrid/security/failure_text.py


class Message(NamedTuple):
    """A call, or what comes back.

    Attributes:
        number: of the call, on its connection.
        value: numbers, text, and tuples and lists of such.
    """

    kind: Kind
    number: int
    value: Any
    tensors: Sequence[Tensor] = ()


class Frames:
    """Both directions of one end of a connection; each for one thread at a time.

    Args:
        sending, receiving: seal and open.
        expected: kinds of message that may come.
        memory: that both ends have, where they are on one host.
    """

    def __init__(
        self, sending: Direction, receiving: Direction, *expected: Kind, memory: HostMemory | None = None
    ) -> None:
        self._sending = sending
        self._receiving = receiving
        self._expected = expected
        self._memory = memory
        self._sealed = bytearray(_FIRST_BYTES)
        self._came = bytearray(_FIRST_BYTES)
        self._start = self._end = 0  # of what has come and is not opened

    def close(self) -> None:
        """Let go of the memory of both ends, but for what others here have borrowed of it."""
        self._memory = None

    def seal(self, message: Message) -> memoryview:
        """The frame of a message, good until the next.

        Raises:
            ClusterError: a tensor is not on the CPU.
        """
        tensors, memory = message.tensors, self._memory
        if not all(each.is_cpu for each in tensors):
            raise ClusterError("what is on a GPU does not travel between trainers and workers")
        shapes = described(tensors)
        block = None if memory is None else memory.lent.lend(tensors, shapes)
        returned = [] if memory is None else memory.borrowed.returned()
        said = (message.kind.value, *message[1:3], shapes, block and tuple(block), returned)
        head = pickle.dumps(said, pickle.HIGHEST_PROTOCOL)
        parts: list[bytes | memoryview] = [head]
        if block is None:
            tensors = [each if is_contiguous(each) else each.contiguous() for each in tensors]
            parts += [part for each in tensors for part in memory_of(each)]
        length = _LENGTHS.size + sum(map(len, parts)) + TAG_BYTES * len(parts)
        if length > len(self._sealed):
            self._sealed = bytearray(length)
        frame = memoryview(self._sealed)[:length]
        at = _LENGTHS.size
        _LENGTHS.pack_into(frame, 0, len(head) + TAG_BYTES, length - at)
        for part in parts:
            end = at + len(part) + TAG_BYTES
            self._sending.seal_into(part, frame[at:end])
            at = end
        return frame

    def receive(self, connection: socket.socket) -> bool:
        """Take what has come; whether anything has.

        Args:
            connection: which does not block.

        Raises:
            OSError: it is broken, or closed.
        """
        if self._end == len(self._came):
            self._make_room()
        try:
            count = connection.recv_into(memoryview(self._came)[self._end :])
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("it has closed the connection")
        self._end += count
        return True

    def _make_room(self) -> None:
        """Twice the room where one frame fills it: as much as somebody has sent, not as much as he claims."""
        rest = memoryview(self._came)[self._start : self._end]
        room = bytearray(len(self._came) * (1 if self._start else 2))
        room[: len(rest)] = rest
        self._came, self._start, self._end = room, 0, len(rest)

    def next(self) -> Message | None:
        """The next message that has come whole; None where none has.

        Raises:
            RejectedMessage: it is not what the other end has sent next, or holds what may not travel.
        """
        if self._end - self._start < _LENGTHS.size:
            return None
        head, length = _LENGTHS.unpack_from(self._came, self._start)
        start = self._start + _LENGTHS.size
        if self._end - start < length:
            return None
        self._start = start + length
        try:
            message = self._open(memoryview(self._came)[start : self._start], head)
        except RejectedMessage:
            raise
        except Exception as error:  # a pickle may have anything raised, for want of memory too
            raise RejectedMessage(f"it holds no message ({type(error).__name__})") from error
        if self._start == self._end:
            self._start = self._end = 0
        return message

    def _open(self, sealed: memoryview, head: int) -> Message:
        at = min(head, len(sealed))
        opened = io.BytesIO(self._receiving.open(sealed[:at]))
        kind, number, value, shapes, block, returned = PlainUnpickler(opened).load()
        memory = self._memory  # which another thread may close meanwhile
        if memory is not None:
            memory.lent.take_back(returned)
        if block is None:
            tensors, at = self._open_tensors(shapes, sealed, at)
        elif memory is None:
            raise RejectedMessage("it tells of memory that is not there")
        else:
            tensors = memory.borrowed.tensors(Block(*block), shapes)
        if at != len(sealed) or kind not in self._expected:
            raise RejectedMessage("it is not what may come here")
        return Message(Kind(kind), number, value, tensors)

    def _open_tensors(self, shapes: Described, sealed: memoryview, at: int) -> tuple[list[Tensor], int]:
        """The tensors that begin at a place of the frame, and where they end."""
        tensors = []
        for dtype_number, shape in shapes:
            dtype = DTYPES[dtype_number]
            if math.prod(shape) * dtype.itemsize > len(sealed) - at:
                raise RejectedMessage("a tensor is larger than what has come")
            tensors.append(torch.empty(shape, dtype=dtype))
            for part in memory_of(tensors[-1], to_write=True):
                end = at + len(part) + TAG_BYTES
                self._receiving.open_into(sealed[at:end], part)
                at = end
        return tensors, at
