"""Signatures of RPC payloads: who of this run has sent them, for whom, and that they are new.

A payload is the bytes of a pickle and the tensors beside it. The pickle is sealed, and sent as::

    header          sender (16 bytes), kind (1), number (8)
    tags            16 bytes for each part of the tensors but the first
    sealed pickle   as long as the pickle, and a tag of 16 bytes

It is sealed by AES-256-GCM (NIST SP 800-38D), with the bytes of the first tensor as additional data: one
call for a message with one tensor, since in a busy process a call costs more than many bytes do. Further
tensors, and parts of such as are larger than the library takes at once, have tags of their own (GMAC).
Tensors are signed where they lie, and not copied. Their dtypes and shapes are in the pickle; of those on
other devices than the CPU that is all.

GCM's one rule is that no nonce comes twice under a key. So each key belongs to one sender, which is a random
number of a process, to a kind, and to a receiver; and a nonce is the number of the message, counted by the
process, and an index: of a part with a tag of its own, from 1, and of the pickle how many parts there are,
above all indices of parts. So no tag of a tensor can pass for a pickle.
"""

import ctypes
import itertools
import secrets
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from hybrid.security.rejected_messages import RefusedPayload
from hybrid.security.replay_window import ReplayWindow
from hybrid.security.secret import Secret

_ID_BYTES = _TAG_BYTES = 16
_START_BYTES = _ID_BYTES + 1
_NUMBER_BYTES, _INDEX_BYTES = 8, 4
_HEADER_BYTES = _START_BYTES + _NUMBER_BYTES
# The library takes less than 2 GiB at once.
_LARGEST_PART = 1 << 30
_READ_ONLY, _WRITABLE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
_OF_PICKLE = 1 << 31  # more parts than this no message has

UNSIGNED = "it is not signed for this process by a role of this run"

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Kind(IntEnum):
    """What a payload is; whom it is signed for follows from it."""

    CALL = 1  # for the receiver's name
    GATHER = 2  # for everyone: torch's own messages at start and end
    ANSWER = 3  # for the caller's sender number
    ERROR = 4  # for the caller's sender number


class _Line(NamedTuple):
    """What one sender sends of one kind, to one receiver.

    Attributes:
        start: of every header.
    """

    start: bytes
    kind: Kind
    aead: AESGCM


class Signatures:
    """Signs what this process sends, and checks what it is sent.

    Args:
        secret: the cluster's.
        run_id: drawn anew at each start of the cluster; nothing signed in one is good in another.
        name: of this process, as RPC knows it.

    Attributes:
        sender: this process's random number.
    """

    def __init__(self, secret: Secret, run_id: bytes, name: str) -> None:
        self.sender = secrets.token_bytes(_ID_BYTES)
        self._secret = secret
        self._run_id = run_id
        self._name = name.encode()
        self._numbers = itertools.count()
        self._sending: dict[tuple[Kind, bytes], _Line] = {}
        # By the start of a header. Only who has the secret gets in here: it holds the roles of the run.
        self._receiving: dict[bytes, tuple[_Line, ReplayWindow]] = {}

    def seal(self, kind: Kind, to: bytes, pickled: bytes, tensors: Sequence[Tensor]) -> bytes:
        """The payload that stands for a pickle.

        Args:
            to: the receiver's name, or sender number, or nothing; see :class:`Kind`.
            tensors: beside it, each in one piece.
        """
        line = self._sending.get((kind, to))
        if line is None:
            line = self._sending[kind, to] = self._line(self.sender, kind, to)
        number = next(self._numbers).to_bytes(_NUMBER_BYTES, "little")
        parts, encrypt = _parts(tensors), line.aead.encrypt
        tags = [encrypt(_nonce(number, i), b"", parts[i]) for i in range(1, len(parts))]
        sealed = encrypt(_nonce(number, _OF_PICKLE | len(parts)), pickled, parts[0] if parts else None)
        return b"".join((line.start, number, *tags, sealed))

    def open(self, payload: bytes, tensors: Sequence[Tensor]) -> tuple[Kind, bytes, bytes]:
        """Check a payload; its kind, its sender, and the pickle.

        Raises:
            RefusedPayload: nobody of this run has signed it for this process, it was changed on the way, or
                it has come before.
        """
        # What does not lie in one piece nobody has signed, and must not be read as if it did.
        if not all(map(is_in_one_piece, tensors)):
            raise RefusedPayload(UNSIGNED)
        start, number = payload[:_START_BYTES], payload[_START_BYTES:_HEADER_BYTES]
        known = self._receiving.get(start) or (self._line_of(start), ReplayWindow())
        _, kind, aead = known[0]
        at = _HEADER_BYTES
        try:
            parts = _parts(tensors)
            for i in range(1, len(parts)):
                aead.decrypt(_nonce(number, i), payload[at : at + _TAG_BYTES], parts[i])
                at += _TAG_BYTES
            nonce = _nonce(number, _OF_PICKLE | len(parts))
            pickled = aead.decrypt(nonce, payload[at:], parts[0] if parts else None)
        except (InvalidTag, ValueError) as error:  # the library says ValueError where bytes are missing
            raise RefusedPayload(UNSIGNED) from error
        _, window = self._receiving.setdefault(start, known)
        if not window.admit(int.from_bytes(number, "little")):
            raise RefusedPayload("it has come before")
        return kind, start[:_ID_BYTES], pickled

    def _line_of(self, start: bytes) -> _Line:
        """The line that a header begins to name."""
        try:
            kind = Kind(start[_ID_BYTES])
        except (IndexError, ValueError) as error:
            raise RefusedPayload(UNSIGNED) from error
        to = self._name if kind is Kind.CALL else b"" if kind is Kind.GATHER else self.sender
        return self._line(start[:_ID_BYTES], kind, to)

    def _line(self, sender: bytes, kind: Kind, to: bytes) -> _Line:
        start = sender + bytes([kind])
        return _Line(start, kind, AESGCM(self._secret.key("call", self._run_id + start + to)))


def is_in_one_piece(tensor: Tensor) -> bool:
    """Whether a tensor is its shape, its dtype, and bytes that lie in one piece."""
    return not tensor.is_nested and tensor.layout is torch.strided and tensor.is_contiguous()


def _nonce(number: bytes, index: int) -> bytes:
    return number + index.to_bytes(_INDEX_BYTES, "little")


def _parts(tensors: Sequence[Tensor]) -> list[memoryview | bytes]:
    """The bytes of tensors where they lie; one part for each that is not huge."""
    return [part for tensor in tensors for part in memory_of(tensor) or (b"",)]


def memory_of(tensor: Tensor, to_write: bool = False) -> list[memoryview]:
    """The bytes of a tensor in one piece, where they lie, in parts that can be sealed.

    Nothing where it is empty, or on another device than the CPU. The caller keeps the tensor.
    """
    if not tensor.is_cpu or not (num_bytes := tensor.nbytes):
        return []
    whole: memoryview = _view(tensor.data_ptr(), num_bytes, _WRITABLE if to_write else _READ_ONLY)
    if num_bytes <= _LARGEST_PART:
        return [whole]
    return [whole[at : at + _LARGEST_PART] for at in range(0, num_bytes, _LARGEST_PART)]
