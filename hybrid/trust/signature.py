"""Signatures of RPC payloads: who of this run has sent them, for whom, and that they are new.

A payload is the bytes of a pickle and the tensors beside it. Its signature::

    header                  sender (16 bytes), number (8), kind (1), how many tags follow tag 0 (4)
    tag 0 (16 bytes)        of header, receiver, kinds and shapes of the tensors, small ones, and the pickle
    tag 1, 2, ...           of the bytes of each larger tensor

Tags are those of AES-256-GCM without a text to encrypt (GMAC, NIST SP 800-38D). Its one rule is that no nonce
comes twice under a key. So every process has a key of its own, derived from the cluster's secret, the run and
a random number, the sender; and a nonce is the number of the message, counted by the process, and that of
the tag. Larger tensors are signed where they lie, and not copied. Of tensors on other devices than the CPU,
dtypes and shapes are signed, but not the bytes.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from hybrid.secret import Secret
from hybrid.trust.refusals import RefusedPayload
from hybrid.trust.replay import ReplayWindow

_ID_BYTES = 16
_TAG_BYTES = 16
_HEADER = struct.Struct(f"<{_ID_BYTES}sQBI")
_NONCE = struct.Struct("<QI")
# A tag costs as much time as to copy so many bytes.
_SMALL = 1 << 14
_HERE = {True: b" ", False: b" elsewhere"}
# The library takes less than 2 GiB at once.
_LARGEST_PART = 1 << 30
_READ_ONLY = 0x100  # PyBUF_READ
_UNSIGNED = "it is not signed for this process by a role of this run"

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Kind(IntEnum):
    """What a payload is; whom it is signed for follows from it."""

    CALL = 1  # for the receiver's name
    GATHER = 2  # for everyone: torch's own messages at start and end
    ANSWER = 3  # for the caller's sender number
    ERROR = 4  # for the caller's sender number


class Opened(NamedTuple):
    """A payload whose signature is good."""

    kind: Kind
    sender: bytes
    pickled: memoryview


@dataclass(slots=True)
class _Sender:
    """What is known of one that has signed."""

    aead: AESGCM
    window: ReplayWindow = field(default_factory=ReplayWindow)


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
        self._own = self._aead(self.sender)
        self._numbers = itertools.count()
        # Only who has the secret gets in here: it holds the roles of the run.
        self._senders: dict[bytes, _Sender] = {}

    def sign(self, kind: Kind, to: bytes, pickled: bytes, tensors: Sequence[Tensor]) -> bytes:
        """The signature of a payload; it goes before the pickle.

        Args:
            to: the receiver's name, or sender number, or nothing; see :class:`Kind`.
            tensors: contiguous.
        """
        number = next(self._numbers)
        parts = [*_parts(tensors)]
        signature = header = _HEADER.pack(self.sender, number, kind, len(parts))
        encrypt = self._own.encrypt
        signature += encrypt(_NONCE.pack(number, 0), b"", _first_part(header, to, pickled, tensors))
        for index, part in enumerate(parts, 1):
            signature += encrypt(_NONCE.pack(number, index), b"", part)
        return signature

    def open(self, payload: bytes, tensors: Sequence[Tensor]) -> Opened:
        """Check a payload.

        Raises:
            RefusedPayload: nobody of this run has signed it for this process, it was changed on the way, or
                it has come before.
        """
        # What does not lie in one piece nobody has signed, and must not be read as if it did.
        if len(payload) < _HEADER.size or not all(map(is_signable, tensors)):
            raise RefusedPayload(_UNSIGNED)
        header = payload[: _HEADER.size]
        id_, number, kind, num_parts = _HEADER.unpack(header)
        tags, pickled = _split(payload, 1 + num_parts)
        to = self._name if kind == Kind.CALL else b"" if kind == Kind.GATHER else self.sender
        sender = self._senders.get(id_) or _Sender(self._aead(id_))
        try:
            decrypt = sender.aead.decrypt
            decrypt(_NONCE.pack(number, 0), tags[0], _first_part(header, to, pickled, tensors))
            for index, part in enumerate(_parts(tensors), 1):
                decrypt(_NONCE.pack(number, index), tags[index], part)
        except InvalidTag as error:
            raise RefusedPayload(_UNSIGNED) from error
        if not self._senders.setdefault(id_, sender).window.admit(number):
            raise RefusedPayload("it has come before")
        return Opened(Kind(kind), id_, pickled)

    def _aead(self, sender: bytes) -> AESGCM:
        return AESGCM(self._secret.key("call", self._run_id + sender))


def is_signable(tensor: Tensor) -> bool:
    """Whether a tensor is its shape, its dtype, and bytes that lie in one piece."""
    return not tensor.is_nested and tensor.layout is torch.strided and tensor.is_contiguous()


def _split(payload: bytes, num_tags: int) -> tuple[list[bytes], memoryview]:
    """The tags of a payload, and its pickle."""
    start = _HEADER.size + _TAG_BYTES * num_tags
    if len(payload) < start:
        raise RefusedPayload(_UNSIGNED)
    tags = [payload[at : at + _TAG_BYTES] for at in range(_HEADER.size, start, _TAG_BYTES)]
    return tags, memoryview(payload)[start:]


@cache
def _dtype_name(dtype: torch.dtype) -> bytes:
    return str(dtype).encode()


def _first_part(header: bytes, to: bytes, pickled: bytes | memoryview, tensors: Sequence[Tensor]) -> bytes:
    shapes, small = b"", []
    for tensor in tensors:
        shapes += _dtype_name(tensor.dtype) + _HERE[tensor.is_cpu] + repr(tuple(tensor.shape)).encode()
        if tensor.is_cpu and (num_bytes := tensor.nbytes) <= _SMALL:
            small.append(ctypes.string_at(tensor.data_ptr(), num_bytes))
    # Lengths in front, so that no two payloads are the same bytes; those of tensors follow from their shapes.
    lengths = struct.pack("<II", len(to), len(shapes))
    return b"".join((header, lengths, to, shapes, *small, pickled))


def _parts(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bytes of the larger tensors, where they lie, in parts that can be signed."""
    for tensor in tensors:
        if tensor.is_cpu and tensor.nbytes > _SMALL:
            # The view does not keep the tensor; the caller does.
            whole: memoryview = _view(tensor.data_ptr(), tensor.nbytes, _READ_ONLY)
            if len(whole) <= _LARGEST_PART:
                yield whole
            else:
                yield from (whole[at : at + _LARGEST_PART] for at in range(0, len(whole), _LARGEST_PART))
