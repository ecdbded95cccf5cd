"""Sums over the trainers of one host, through memory that they share.

::

    trainer 0   copy into its slot, say so to all ─┐ all have:
                                                   ├ slot 0 + slot 1 + ..., in rank order, on each
    trainer 1   copy into its slot, say so to all ─┘

Each trainer has two slots and takes them in turn: by the time that all have written the next one, all have
read the one before, so that a sum takes one signal each way and no lock. A signal is a byte on a socket,
which also tells at once when a trainer is gone. The memory has no name, and ends with the last process that
has it; sockets have names that are no files.

The process group does the same by messages over TCP, in threads of its own: on 2 cores, 2 ms for 2 MB and
0.7 ms for a number, when nobody else wants a core.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.errors import ClusterError
from hybrid.trust.sockets import is_own_user

MOST_TRAINERS = 8  # every one reads what all have written
_CARD_BYTES = 256
_TOKEN_BYTES = 16
_HELLO_SECONDS = 1.0
_SLOTS = 2
_ALIGNMENT = 64
_WRITTEN = b"w"


class SharedSum:
    """One trainer's part in the sums of a group of trainers; made by :meth:`join`.

    Args:
        rank: this trainer's place in the group.
        peers: a connected socket for every other place.
        timeout_seconds: how long to wait for any of them.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_seconds: float) -> None:
        self._rank = rank
        self._peers = peers
        self._slot_bytes = 0
        self._memory: list[mmap.mmap] = []  # of every place, its slots one after the other
        self._turn = 0
        for peer in peers.values():
            peer.settimeout(timeout_seconds)
        weakref.finalize(self, _close, list(peers.values()))

    @classmethod
    def join(cls, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float) -> SharedSum | None:
        """Meet the other trainers of ``group``, all of which call this; None where memory cannot be shared.

        It can where all are processes of one Linux host with gradients in its memory, and not too many.

        Args:
            group: one that takes tensors of the CPU.
            device: where this trainer's gradients are.

        Raises:
            ClusterError: a trainer did not come in time.
        """
        rank, size = group.rank(), group.size()
        if size == 1 or size > MOST_TRAINERS:
            return None
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("")  # Linux chooses a name
            listener.listen(socket.SOMAXCONN)
            card = {"place": _place(device), "name": listener.getsockname().hex(), "token": token.hex()}
            cards = _exchange(card, group)
            if card["place"] is None or any(other["place"] != card["place"] for other in cards):
                return None
            deadline = time.monotonic() + timeout_seconds
            peers = {place: _call(cards[place], rank) for place in range(rank)}
            while len(peers) < size - 1:
                peers |= _accept(listener, token, range(rank + 1, size), deadline)
        return cls(rank, peers, timeout_seconds)

    def sum_(self, tensor_N: Tensor) -> None:
        """Replace a tensor by the sum of all trainers' tensors, the same bits on each.

        Trainers call this in the same order, with tensors of the same size and type.

        Args:
            tensor_N: contiguous, on the CPU.

        Raises:
            ClusterError: a trainer is gone, or did not come in time.
        """
        if tensor_N.nbytes > self._slot_bytes:
            self._grow(tensor_N.nbytes)
        slots = [self._slot(memory, tensor_N) for memory in self._memory]
        slots[self._rank].copy_(tensor_N)
        for place in self._peers:
            self._send(place)
        for place in self._peers:
            self._receive(place)
        torch.add(slots[0], slots[1], out=tensor_N)
        for slot_N in slots[2:]:
            tensor_N.add_(slot_N)
        self._turn = (self._turn + 1) % _SLOTS

    def _slot(self, memory: mmap.mmap, like_N: Tensor) -> Tensor:
        return torch.frombuffer(
            memory, dtype=like_N.dtype, count=like_N.numel(), offset=self._turn * self._slot_bytes
        )

    def _grow(self, num_bytes: int) -> None:
        """Make larger slots; all trainers come here at the same sum, and hand each other their memory."""
        self._slot_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        own = os.memfd_create("hybrid gradients")
        try:
            os.ftruncate(own, _SLOTS * self._slot_bytes)
            for place in self._peers:
                self._send(place, [own])
            mapped = {self._rank: mmap.mmap(own, 0)}
        finally:
            os.close(own)
        for place in self._peers:
            (descriptor,) = self._receive(place, 1)
            try:
                mapped[place] = mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
        self._memory = [mapped[place] for place in range(len(mapped))]

    def _send(self, place: int, descriptors: Iterable[int] = ()) -> None:
        try:
            socket.send_fds(self._peers[place], [_WRITTEN], list(descriptors))
        except OSError as error:
            raise _gone(place, error) from error

    def _receive(self, place: int, num_descriptors: int = 0) -> list[int]:
        try:
            if num_descriptors:
                said, descriptors, _, _ = socket.recv_fds(self._peers[place], 1, num_descriptors)
            else:
                said, descriptors = self._peers[place].recv(1), []
        except OSError as error:
            raise _gone(place, error) from error
        if said != _WRITTEN:
            raise _gone(place)
        return descriptors


def _gone(place: int, error: OSError | None = None) -> ClusterError:
    if isinstance(error, TimeoutError):
        return ClusterError(f"trainer {place} of the group: no gradients in cluster.rpc_timeout_seconds")
    return ClusterError(f"trainer {place} of the group is gone while gradients are summed")


def _place(device: torch.device) -> str | None:
    """What processes that can share memory have in common; None where this one cannot."""
    if sys.platform != "linux" or device.type != "cpu":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"  # names of sockets are those of a network namespace


def _exchange(card: dict[str, str | None], group: dist.ProcessGroup) -> list[dict[str, str]]:
    """The cards of all places, in their order."""
    text = json.dumps(card).encode().ljust(_CARD_BYTES)
    assert len(text) == _CARD_BYTES, "a card has a fixed size"
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cards = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([cards], [own]).wait()
    return [json.loads(bytes(card.tolist())) for card in cards]


def _call(card: dict[str, str], rank: int) -> socket.socket:
    """A connection to the trainer that gave ``card``."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(bytes.fromhex(card["name"]))
    peer.sendall(bytes([rank]) + bytes.fromhex(card["token"]))
    return peer


def _accept(
    listener: socket.socket, token: bytes, expected: range, deadline: float
) -> dict[int, socket.socket]:
    """The next connection and its place; nothing where it is not of the group: any process can connect."""
    listener.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        peer, _ = listener.accept()
    except TimeoutError:
        raise ClusterError("a trainer of this host did not come to share memory in time") from None
    if not is_own_user(peer):  # others are not waited for
        peer.close()
        return {}
    peer.settimeout(_HELLO_SECONDS)
    try:
        hello = peer.recv(1 + len(token), socket.MSG_WAITALL)
    except OSError:
        hello = b""
    if hmac.compare_digest(hello[1:], token) and hello[0] in expected:
        return {hello[0]: peer}
    peer.close()
    return {}


def _close(peers: Iterable[socket.socket]) -> None:
    for peer in peers:
        peer.close()
