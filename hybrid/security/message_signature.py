"""Signatures of RPC payloads: a role of this run sent it, to this process, and only once.

A payload is the bytes of a pickle, with tensors beside it. The pickle is encrypted, and sent as::

    header           sender (16 bytes), kind (1), number (8)
    tags             16 bytes for each segment of the tensors but the first
    sealed pickle    as long as the pickle, and a tag of 16 bytes

AES-256-GCM (NIST SP 800-38D) seals it, with the bytes of the first tensor as additional data: one call for a
message with one tensor, since a call costs more than many bytes do. Every further segment has a tag of its
own (GMAC); a segment is a tensor, or a part of one that is larger than the library accepts at once. Tensors
are signed in place. Their dtypes and shapes are in the pickle; a tensor on a GPU is signed by these alone.

GCM must never use a nonce twice with one key. So a key belongs to one sender (a random number of a process),
one kind and one receiver. A nonce is the number of the message and an index: from 1 for tags, and for the
pickle the number of segments with the highest bit set. So the tag of a tensor can never pass for a pickle.
"""

import ctypes
import itertools
import secrets
import threading
from collections.abc import Sequence
from enum import IntEnum

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from hybrid.security.rejected_messages import RejectedMessage
from hybrid.security.secret import Secret

_ID_BYTES = _TAG_BYTES = 16
_START_BYTES = _ID_BYTES + 1
_NUMBER_BYTES, _INDEX_BYTES = 8, 4
_HEADER_BYTES = _START_BYTES + _NUMBER_BYTES
LARGEST_SEGMENT = 1 << 30  # the library accepts less than 2 GiB at once
_READ_ONLY, _WRITABLE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
_PICKLE_INDEX = 1 << 31
# Messages overtake each other between threads and connections, by as many as a sender sends to all receivers
# within the timeout of a call. Bits of numbers that do not come take address space, not memory.
_WINDOW_BYTES = 1 << 17

UNSIGNED = "it is not signed for this process by a role of this run"

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class PayloadKind(IntEnum):
    """The kinds of payloads; a kind says who the receiver is."""

    CALL = 1  # the role of a name
    GATHER = 2  # every role: torch's own messages at start and end
    RESPONSE = 3  # the process of a sender number
    ERROR = 4  # the process of a sender number


class ReplayWindow:
    """Accepts each message number once, in any order, unless it is far behind the highest one.

    A ring of bits over the numbers around the highest, as in RFC 6479.

    Args:
        num_bytes: size of the ring; 8 numbers per byte.
    """

    def __init__(self, num_bytes: int = _WINDOW_BYTES) -> None:
        self._bits = bytearray(num_bytes)
        self._highest = 0
        self._lock = threading.Lock()

    def accept(self, number: int) -> bool:
        """Record ``number``; False if it was recorded before, or may have been."""
        size = len(self._bits)
        byte, bit = number >> 3, 1 << (number & 7)
        with self._lock:
            last = self._highest >> 3
            if byte > last:
                if byte - last >= size:
                    self._bits = bytearray(size)
                else:
                    for entered in range(last + 1, byte + 1):
                        self._bits[entered % size] = 0
            elif last - byte >= size:
                return False
            if self._bits[byte % size] & bit:
                return False
            self._bits[byte % size] |= bit
            self._highest = max(self._highest, number)
            return True


class Signatures:
    """Signs what this process sends, and verifies what it receives.

    Args:
        secret: the cluster's.
        run_id: random, and new at each start of the cluster. A signature is valid within one start only.
        name: RPC name of this process.

    Attributes:
        sender: random number of this process.
    """

    def __init__(self, secret: Secret, run_id: bytes, name: str) -> None:
        self.sender = secrets.token_bytes(_ID_BYTES)
        self._secret = secret
        self._run_id = run_id
        self._name = name.encode()
        self._numbers = itertools.count()
        self._sending: dict[tuple[PayloadKind, bytes], AESGCM] = {}
        # By the start of a header. Only a verified payload adds an entry, so there are few.
        self._receiving: dict[bytes, tuple[AESGCM, ReplayWindow]] = {}

    def sign(self, kind: PayloadKind, receiver: bytes, pickled: bytes, tensors: Sequence[Tensor]) -> bytes:
        """Return the payload of a pickle.

        Args:
            receiver: a name, a sender number, or nothing; see :class:`PayloadKind`.
            tensors: beside the pickle, each contiguous.
        """
        start = self.sender + bytes([kind])
        if (key := self._sending.get((kind, receiver))) is None:
            key = self._sending[kind, receiver] = self._key(start, receiver)
        number = next(self._numbers).to_bytes(_NUMBER_BYTES, "little")
        segments, encrypt = _segments(tensors), key.encrypt
        tags = [encrypt(_nonce(number, i), b"", segments[i]) for i in range(1, len(segments))]
        nonce = _nonce(number, _PICKLE_INDEX | len(segments))
        sealed = encrypt(nonce, pickled, segments[0] if segments else None)
        return b"".join((start, number, *tags, sealed))

    def verify(self, payload: bytes, tensors: Sequence[Tensor]) -> tuple[PayloadKind, bytes, bytes]:
        """Return kind, sender and pickle of a payload.

        Raises:
            RejectedMessage: no role of this run signed it for this process, somebody changed it, or it came
                before.
        """
        # Nobody signs what is not contiguous, and it must not be read as if it were.
        if not all(map(is_contiguous, tensors)):
            raise RejectedMessage(UNSIGNED)
        start, number = payload[:_START_BYTES], payload[_START_BYTES:_HEADER_BYTES]
        at = _HEADER_BYTES
        try:
            kind = PayloadKind(start[_ID_BYTES])
            own = {PayloadKind.CALL: self._name, PayloadKind.GATHER: b""}
            if (known := self._receiving.get(start)) is None:
                known = self._key(start, own.get(kind, self.sender)), ReplayWindow()
            aead = known[0]
            segments = _segments(tensors)
            for i in range(1, len(segments)):
                aead.decrypt(_nonce(number, i), payload[at : at + _TAG_BYTES], segments[i])
                at += _TAG_BYTES
            nonce = _nonce(number, _PICKLE_INDEX | len(segments))
            pickled = aead.decrypt(nonce, payload[at:], segments[0] if segments else None)
        # The library raises ValueError if bytes are missing.
        except (InvalidTag, ValueError, IndexError) as error:
            raise RejectedMessage(UNSIGNED) from error
        _, window = self._receiving.setdefault(start, known)
        if not window.accept(int.from_bytes(number, "little")):
            raise RejectedMessage("it has come before")
        return kind, start[:_ID_BYTES], pickled

    def _key(self, start: bytes, receiver: bytes) -> AESGCM:
        """Return the key of one sender and kind, which start a header, and one receiver."""
        return AESGCM(self._secret.key("call", self._run_id + start + receiver))


def _nonce(number: bytes, index: int) -> bytes:
    return number + index.to_bytes(_INDEX_BYTES, "little")


def _segments(tensors: Sequence[Tensor]) -> list[memoryview | bytes]:
    """The bytes of tensors, in place; one segment for each tensor that is not huge."""
    return [segment for tensor in tensors for segment in memory_of(tensor) or (b"",)]


def is_contiguous(tensor: Tensor) -> bool:
    """Whether shape, dtype and one contiguous range of bytes are all of a tensor."""
    return not tensor.is_nested and tensor.layout is torch.strided and tensor.is_contiguous()


def memory_of(tensor: Tensor, to_write: bool = False) -> list[memoryview]:
    """Return views of the bytes of a contiguous tensor, in segments that can be sealed.

    The list is empty if the tensor is, or lies on a GPU. The caller keeps the tensor.
    """
    if not tensor.is_cpu or not (num_bytes := tensor.nbytes):
        return []
    whole: memoryview = _view_memory(tensor.data_ptr(), num_bytes, _WRITABLE if to_write else _READ_ONLY)
    if num_bytes <= LARGEST_SEGMENT:
        return [whole]
    return [whole[at : at + LARGEST_SEGMENT] for at in range(0, num_bytes, LARGEST_SEGMENT)]
