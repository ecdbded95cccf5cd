"""Signatures of RPC payloads, which prove that a role of this run sent a payload to this process, once.

A payload consists of tensors and of a pickle that refers to the tensors by index. The pickle is encrypted and
sent as::

    header           sender (16 bytes), kind (1), number (8)
    tags             16 bytes for each segment of the tensors except the first
    sealed pickle    the encrypted pickle, and a tag of 16 bytes

A segment is a tensor, or a chunk of a tensor that exceeds the library's limit. AES-256-GCM (NIST SP 800-38D)
encrypts the pickle, and signs the first segment as additional data. So a message with one tensor takes one
call of the library, whose overhead is large. Each further segment has its own tag (GMAC). Tensors are signed
in place. Their dtypes and shapes are in the pickle. The bytes of tensors on a GPU are not signed.

GCM must never use a nonce twice with one key. So a key belongs to one sender (a random number of a process),
one kind and one receiver. A nonce consists of the number of the message and an index. The indices of tags
start at 1. The index of the pickle is the number of segments, with the highest bit set. So the tag of a
tensor is never valid as an encrypted pickle.
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
# Messages can arrive out of order, by as many as a sender sends to all receivers within the timeout of a
# call. Pages of the ring that are never written take address space, not memory.
_WINDOW_BYTES = 1 << 17

UNSIGNED = "it is not signed for this process by a role of this run"

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class PayloadKind(IntEnum):
    """The kinds of payloads. The kind determines what identifies the receiver."""

    CALL = 1  # the RPC name of a role
    GATHER = 2  # nothing: torch's messages at start and end, which all roles receive
    RESPONSE = 3  # the sender number of a process
    ERROR = 4  # the sender number of a process


class ReplayWindow:
    """Accepts each message number once, in any order; rejects numbers far below the highest one.

    A ring of ``num_bytes`` bytes has a bit for each recent number, as in RFC 6479.
    """

    def __init__(self, num_bytes: int = _WINDOW_BYTES) -> None:
        self._bits = bytearray(num_bytes)
        self._highest = 0
        self._lock = threading.Lock()

    def accept(self, number: int) -> bool:
        """Record ``number``; return False if it is recorded already, or below the window."""
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
    """Signs the payloads that this process sends, and verifies the payloads that it receives.

    Args:
        run_id: random bytes, new at each start of the cluster. A signature is valid within one start only.
        name: RPC name of this process.
    """

    def __init__(self, secret: Secret, run_id: bytes, name: str) -> None:
        self.sender = secrets.token_bytes(_ID_BYTES)
        self._secret = secret
        self._run_id = run_id
        self._name = name.encode()
        self._numbers = itertools.count()
        self._sending: dict[tuple[PayloadKind, bytes], AESGCM] = {}
        # By sender and kind, as in a header. Only verified payloads add entries, so there are few.
        self._receiving: dict[bytes, tuple[AESGCM, ReplayWindow]] = {}

    def sign(self, kind: PayloadKind, receiver: bytes, pickled: bytes, tensors: Sequence[Tensor]) -> bytes:
        """Return the payload of a pickle.

        Args:
            receiver: an RPC name, a sender number, or nothing; see :class:`PayloadKind`.
            tensors: contiguous tensors that the pickle refers to.
        """
        start = self.sender + bytes([kind])
        key = self._sending.get((kind, receiver))
        if key is None:
            key = self._sending[kind, receiver] = self._key(start, receiver)
        number = next(self._numbers).to_bytes(_NUMBER_BYTES, "little")
        segments, encrypt = _segments(tensors), key.encrypt
        tags = [encrypt(_nonce(number, i), b"", segments[i]) for i in range(1, len(segments))]
        nonce = _nonce(number, _PICKLE_INDEX | len(segments))
        sealed = encrypt(nonce, pickled, segments[0] if segments else None)
        return b"".join((start, number, *tags, sealed))

    def verify(self, payload: bytes, tensors: Sequence[Tensor]) -> tuple[PayloadKind, bytes, bytes]:
        """Return kind, sender and pickle of a payload; RejectedMessage if it is forged or replayed."""
        # Senders sign contiguous tensors only. Other tensors must not be read as one range of memory.
        if not all(map(is_contiguous, tensors)):
            raise RejectedMessage(UNSIGNED)
        start, number = payload[:_START_BYTES], payload[_START_BYTES:_HEADER_BYTES]
        at = _HEADER_BYTES
        try:
            kind = PayloadKind(start[_ID_BYTES])
            own = {PayloadKind.CALL: self._name, PayloadKind.GATHER: b""}
            known = self._receiving.get(start)
            if known is None:
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
            raise RejectedMessage("it was received before")
        return kind, start[:_ID_BYTES], pickled

    def _key(self, start: bytes, receiver: bytes) -> AESGCM:
        """Return the key of a sender and kind, the start of a header, and a receiver."""
        return AESGCM(self._secret.key("call", self._run_id + start + receiver))


def _nonce(number: bytes, index: int) -> bytes:
    return number + index.to_bytes(_INDEX_BYTES, "little")


def _segments(tensors: Sequence[Tensor]) -> list[memoryview | bytes]:
    """Return views of the bytes of tensors; one segment for each tensor that is not huge."""
    return [segment for tensor in tensors for segment in memory_of(tensor) or (b"",)]


def is_contiguous(tensor: Tensor) -> bool:
    """Whether shape, dtype and one contiguous range of bytes describe a tensor completely."""
    return not tensor.is_nested and tensor.layout is torch.strided and tensor.is_contiguous()


def memory_of(tensor: Tensor, to_write: bool = False) -> list[memoryview]:
    """Return views of the bytes of a contiguous tensor, in segments that the library accepts.

    The list is empty if the tensor is empty or on a GPU. The caller must keep the tensor alive.
    """
    num_bytes = tensor.nbytes
    if not tensor.is_cpu or not num_bytes:
        return []
    whole: memoryview = _view_memory(tensor.data_ptr(), num_bytes, _WRITABLE if to_write else _READ_ONLY)
    if num_bytes <= LARGEST_SEGMENT:
        return [whole]
    return [whole[at : at + LARGEST_SEGMENT] for at in range(0, num_bytes, LARGEST_SEGMENT)]
