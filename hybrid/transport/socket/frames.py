"""Messages of plain values and tensors as encrypted frames.

::

    two lengths        of the sealed head (4 bytes), and of the sealed head and tensors together (8 bytes)
    sealed head        a pickle of numbers, text, tuples and lists; it names no class
    sealed tensors     the bytes of each tensor, in segments if it is huge; absent if the tensors are in a
                       block of shared memory (tensor_blocks.py)

"Sealed" means encrypted and authenticated. Tensors are encrypted from their own memory, and decrypted into
their final memory. The lengths are not encrypted. A changed length makes a frame invalid or incomplete.
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
from hybrid.security.message_signature import memory_of
from hybrid.security.rejections import PlainUnpickler, RejectionError
from hybrid.security.secret import TAG_BYTES, DirectionCipher
from hybrid.shared_memory.tensor_blocks import DTYPES, MemoryPair, layout_of

_LENGTHS = struct.Struct("<IQ")
_INITIAL_BUFFER_BYTES = 1 << 16


class FrameKind(IntEnum):
    CALL = 0  # value: the name of a function, and its arguments except tensors
    RESPONSE = 1
    FAILURE = 2  # value: a text of hybrid.errors.describe_exception


class Message(NamedTuple):
    """A call, or the response to a call."""

    kind: FrameKind
    number: int  # number of the call on its connection
    value: Any  # numbers, text, and tuples and lists of these
    tensors: Sequence[Tensor] = ()


class Frames:
    """Converts messages to frames and back, at one end of a connection; one thread at a time per direction.

    Args:
        sending, receiving: ciphers of the two directions.
        expected: kinds of messages that this end may receive.
        memory: memory that both ends share, if they are on one host.
    """

    def __init__(
        self,
        sending: DirectionCipher,
        receiving: DirectionCipher,
        *expected: FrameKind,
        memory: MemoryPair | None = None,
    ) -> None:
        self._sending = sending
        self._receiving = receiving
        self._expected = expected
        self._memory = memory
        self._sealed = bytearray(_INITIAL_BUFFER_BYTES)
        self._received = bytearray(_INITIAL_BUFFER_BYTES)
        self._start = self._end = 0  # of the received bytes that are not decrypted yet

    def close(self) -> None:
        """Release the shared memory; received tensors remain valid."""
        self._memory = None

    def seal(self, message: Message) -> memoryview:
        """Return the sealed frame, valid until the next ``seal``; ClusterError if a tensor cannot be sent."""
        tensors = message.tensors
        memory = self._memory
        for each in tensors:
            if not each.is_cpu or each.dtype not in DTYPES:
                raise ClusterError(f"tensors of {each.dtype} on {each.device} cannot be sent to other roles")
        layout = layout_of(tensors)
        block = None if memory is None else memory.writer.write(tensors)
        released = [] if memory is None else memory.reader.take_released()
        content = (message.kind.value, message.number, message.value, layout, block, released)
        head = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        segments: list[bytes | memoryview] = [head]
        if block is None:
            tensors = [each.contiguous() for each in tensors]  # kept until they are encrypted
            segments += [segment for each in tensors for segment in memory_of(each)]
        length = _LENGTHS.size + sum(map(len, segments)) + TAG_BYTES * len(segments)
        if length > len(self._sealed):
            self._sealed = bytearray(length)
        frame = memoryview(self._sealed)[:length]
        at = _LENGTHS.size
        _LENGTHS.pack_into(frame, 0, len(head) + TAG_BYTES, length - at)
        for segment in segments:
            end = at + len(segment) + TAG_BYTES
            self._sending.seal_into(segment, frame[at:end])
            at = end
        return frame

    def receive(self, connection: socket.socket) -> bool:
        """Receive bytes without waiting. Return whether any had arrived; OSError if disconnected."""
        if self._end == len(self._received):  # grow by the bytes received, not by an announced length
            rest = memoryview(self._received)[self._start : self._end]
            buffer = bytearray(len(self._received) * (1 if self._start else 2))
            buffer[: len(rest)] = rest
            self._received = buffer
            self._start = 0
            self._end = len(rest)
        try:
            count = connection.recv_into(memoryview(self._received)[self._end :])
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("the connection was closed")
        self._end += count
        return True

    def next(self) -> Message | None:
        """Return the next message, or None while bytes are missing; RejectionError for an invalid message."""
        if self._end - self._start < _LENGTHS.size:
            return None
        head, length = _LENGTHS.unpack_from(self._received, self._start)
        start = self._start + _LENGTHS.size
        if self._end - start < length:
            return None
        self._start = start + length
        try:
            message = self._open(memoryview(self._received)[start : self._start], head)
        except RejectionError:
            raise
        except Exception as error:  # unpickling can raise anything, out of memory included
            raise RejectionError(f"it holds no message ({type(error).__name__})") from error
        if self._start == self._end:
            self._start = self._end = 0
        return message

    def _open(self, sealed: memoryview, head: int) -> Message:
        at = min(head, len(sealed))
        opened = io.BytesIO(self._receiving.open(sealed[:at]))
        kind, number, value, layout, block, released = PlainUnpickler(opened).load()
        memory = self._memory  # another thread may close it meanwhile
        if memory is not None:
            memory.writer.free(released)
        if block is None:
            tensors = []
            for dtype_number, shape in layout:
                dtype = DTYPES[dtype_number]
                if math.prod(shape) * dtype.itemsize > len(sealed) - at:
                    raise RejectionError("a tensor is larger than the message")
                tensors.append(torch.empty(shape, dtype=dtype))
                for segment in memory_of(tensors[-1], to_write=True):
                    end = at + len(segment) + TAG_BYTES
                    self._receiving.open_into(sealed[at:end], segment)
                    at = end
        elif memory is None:
            raise RejectionError("it names memory that does not exist")
        else:
            tensors = memory.reader.read(block, layout)
        if at != len(sealed) or kind not in self._expected:
            raise RejectionError("its kind or its length is unexpected")
        return Message(FrameKind(kind), number, value, tensors)
