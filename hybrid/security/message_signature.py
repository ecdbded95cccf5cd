"""Signatures of RPC payloads, which prove the sender and the receiver, and exclude replays.

A payload consists of tensors and of a pickle that refers to the tensors in order. The pickle is encrypted and
sent as::

    header           sender (16 bytes), kind (1), number (12)
    sealed pickle    the encrypted pickle, and a tag of 16 bytes

AES-256-GCM (NIST SP 800-38D) encrypts the pickle, which contains the dtypes and shapes of the tensors. The
count of the tensors is signed as additional data, and so are the bytes of tensors on the CPU, not on a GPU.

GCM must never use a nonce twice with one key. So a key belongs to one sender (16 random bytes of a process),
one kind and one receiver. The nonce is the number of the message: the sender counts the messages of each key.
"""

import ctypes
import itertools
import secrets
import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from torch import Tensor

from hybrid.security.rejections import RejectionError
from hybrid.security.secret import TAG_BYTES, Secret

_ID_BYTES = 16
_START_BYTES = _ID_BYTES + 1
_NUMBER_BYTES = 12
_HEADER_BYTES = _START_BYTES + _NUMBER_BYTES
_COUNT_BYTES = 4
LARGEST_SEGMENT = 1 << 30  # the library accepts less than 2 GiB at once
_READ_ONLY, _WRITABLE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
# A message overtakes as many others as a sender sends to this process within the timeout of a call.
_MAX_EARLY = 1 << 16

UNSIGNED = "it is not signed for this process by a role of this run"

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class PayloadKind(IntEnum):
    """The kinds of payloads. The comment after a kind says what identifies the receiver of the payload."""

    CALL = 1  # the RPC name of a role
    GATHER = 2  # nothing: torch's messages at start and end, which all roles receive
    RESPONSE = 3  # the 16 random bytes of a process
    ERROR = 4  # the 16 random bytes of a process


class ReplayWindow:
    """Accepts each message number once, in any order.

    Args:
        max_early: a number is rejected if more than ``max_early`` higher numbers have arrived before it.
    """

    def __init__(self, max_early: int = _MAX_EARLY) -> None:
        self._max_early = max_early
        self._next = 0  # lower numbers are not accepted any more
        self._early = set[int]()  # the accepted numbers from ``_next`` on
        self._lock = threading.Lock()

    def accept(self, number: int) -> bool:
        """Record ``number`` and return True; return False if it was received before, or arrives too late."""
        with self._lock:
            if number < self._next or number in self._early:
                return False
            self._early.add(number)
            if len(self._early) > self._max_early:
                self._next = min(self._early)
            while self._next in self._early:
                self._early.remove(self._next)
                self._next += 1
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
        self._sending: dict[tuple[PayloadKind, bytes], tuple[AES256, Iterator[int]]] = {}
        # By sender and kind, as in a header. Only verified payloads add entries, so there are few.
        self._receiving: dict[bytes, tuple[AES256, ReplayWindow]] = {}

    def sign(self, kind: PayloadKind, receiver: bytes, pickled: bytes, tensors: Sequence[Tensor]) -> bytes:
        """Return the payload: the header, the encrypted pickle and the tag.

        Args:
            receiver: an RPC name, the random bytes of a process, or nothing; see :class:`PayloadKind`.
            tensors: contiguous tensors that the pickle refers to.
        """
        start = self.sender + bytes([kind])
        known = self._sending.get((kind, receiver))
        if known is None:  # if another thread adds the key meanwhile, its numbers count
            new = self._key(start, receiver), itertools.count()
            known = self._sending.setdefault((kind, receiver), new)
        key, numbers = known
        number = next(numbers).to_bytes(_NUMBER_BYTES, "little")
        context = Cipher(key, GCM(number)).encryptor()
        for segment in _segments(tensors):
            context.authenticate_additional_data(segment)
        sealed = context.update(pickled) + context.finalize()
        return b"".join((start, number, sealed, context.tag))

    def verify(self, payload: bytes, tensors: Sequence[Tensor]) -> tuple[PayloadKind, bytes, bytes]:
        """Return kind, sender and pickle of ``payload``; RejectionError if it is forged or replayed."""
        # Senders sign contiguous tensors only. Other tensors must not be read as one range of memory.
        if not all(map(is_contiguous, tensors)):
            raise RejectionError(UNSIGNED)
        start, number = payload[:_START_BYTES], payload[_START_BYTES:_HEADER_BYTES]
        try:
            kind = PayloadKind(start[_ID_BYTES])
            own = {PayloadKind.CALL: self._name, PayloadKind.GATHER: b""}
            known = self._receiving.get(start)
            if known is None:
                known = self._key(start, own.get(kind, self.sender)), ReplayWindow()
            context = Cipher(known[0], GCM(number, payload[_HEADER_BYTES:][-TAG_BYTES:])).decryptor()
            for segment in _segments(tensors):
                context.authenticate_additional_data(segment)
            pickled = context.update(payload[_HEADER_BYTES:-TAG_BYTES]) + context.finalize()
        # The library raises ValueError if bytes are missing.
        except (InvalidTag, ValueError, IndexError) as error:
            raise RejectionError(UNSIGNED) from error
        _, window = self._receiving.setdefault(start, known)
        if not window.accept(int.from_bytes(number, "little")):
            raise RejectionError("it was received before")
        return kind, start[:_ID_BYTES], pickled

    def _key(self, start: bytes, receiver: bytes) -> AES256:
        return AES256(self._secret.key("call", self._run_id + start + receiver))


def _segments(tensors: Sequence[Tensor]) -> list[bytes | memoryview]:
    views = (segment for tensor in tensors for segment in memory_of(tensor))
    return [len(tensors).to_bytes(_COUNT_BYTES, "little"), *views]


def is_contiguous(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are in one contiguous range of memory, in row-major order."""
    return not tensor.is_nested and tensor.layout is torch.strided and tensor.is_contiguous()


def memory_of(tensor: Tensor, to_write: bool = False) -> list[memoryview]:
    """Return views of a contiguous tensor's memory, at most 1 GiB each; they are writable if ``to_write``.

    The list is empty if the tensor is empty or on a GPU. The caller must keep the tensor alive.
    """
    num_bytes = tensor.nbytes
    if not tensor.is_cpu or not num_bytes:
        return []
    whole: memoryview = _view_memory(tensor.data_ptr(), num_bytes, _WRITABLE if to_write else _READ_ONLY)
    if num_bytes <= LARGEST_SEGMENT:
        return [whole]
    return [whole[at : at + LARGEST_SEGMENT] for at in range(0, num_bytes, LARGEST_SEGMENT)]
