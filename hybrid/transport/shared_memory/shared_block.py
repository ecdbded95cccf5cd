"""Memory that processes of one host share, each its own part, and the signals by which they take turns.

::

    process 0   write into its slot, say so to all ─┐ all have:
                                                    ├ read the slots of all
    process 1   write into its slot, say so to all ─┘

Each process has two slots and takes them in turn: by the time that all have written the next one, all have
read the one before, so that a turn takes one signal each way and no lock. A signal is a byte on a socket,
which also tells at once when a process is gone. The memory has no name, and ends with the last process that
has it; sockets have names that are no files.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid.errors import ClusterError
from hybrid.security.closed_listeners import is_same_user
from hybrid.topology import Role, RoleKind
from hybrid.transport.shared_memory.tensor_layout import create_memory, map_memory
from hybrid.transport.socket.lent_blocks import own_host

MOST_MEMBERS = 8  # every one reads what all have written
_CARD_BYTES = 256
_TOKEN_BYTES = 16
_HELLO_SECONDS = 1.0
_SLOTS = 2
_PAGE = mmap.PAGESIZE
_WRITTEN = b"w"


class SharedMemory:
    """One trainer's part; made by :meth:`join`. All members call :meth:`publish` equally often, in order.

    Args:
        place: this trainer's, among the members.
        peers: a connected socket for every other place.
        members: the trainers, by place.
        timeout_seconds: how long to wait for any of them.
    """

    def __init__(
        self, place: int, peers: Mapping[int, socket.socket], members: Sequence[Role], timeout_seconds: float
    ) -> None:
        self.place = place
        self.members = members
        self._peers = dict(sorted(peers.items()))
        self._memory: dict[int, mmap.mmap] = {}  # by place: its slots, one after the other
        self._unshown: list[int] = []  # the descriptor of memory that the others do not have yet
        self._turn = 0
        for peer in peers.values():
            peer.settimeout(timeout_seconds)
        weakref.finalize(self, _close, list(peers.values()), self._unshown)

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, trainer: int, may_share: bool, timeout_seconds: float
    ) -> SharedMemory | None:
        """Meet the trainers of ``group`` on this one's host, all of which call this; None where it is alone.

        Where there are many, so many share with each other, and the next so many.

        Args:
            group: one that takes tensors of the CPU.
            trainer: this one's index.
            may_share: whether this one has a use for it.

        Raises:
            ClusterError: a trainer did not come in time.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("")  # Linux chooses a name
            listener.listen(socket.SOMAXCONN)
            host, name = own_host() if may_share else "", listener.getsockname().hex()
            own = _Card(host, name, token.hex(), trainer)
            cards = _exchange(own, group)
            alike = [each for each in cards if each.host == host] if host else [own]
            first = alike.index(own) // MOST_MEMBERS * MOST_MEMBERS
            cards = alike[first : first + MOST_MEMBERS]
            if len(cards) < 2:
                return None
            place, deadline = cards.index(own), time.monotonic() + timeout_seconds
            peers = {each: _call(cards[each], place) for each in range(place)}
            while len(peers) < len(cards) - 1:
                peers |= _accept(listener, token, range(place + 1, len(cards)), deadline)
        return cls(place, peers, [Role(RoleKind.TRAINER, each.trainer) for each in cards], timeout_seconds)

    def slot(self, num_bytes: int) -> memoryview:
        """The own slot of this turn, of at least so many bytes."""
        if self.place not in self._memory or num_bytes > len(self._memory[self.place]) // _SLOTS:
            self._grow(num_bytes)
        return self._slot_of(self._memory[self.place])

    def publish(self) -> list[memoryview]:
        """Show the own slot to the others; theirs of this turn and the own, by place, once all have done so.

        They are good until the next turn.

        Raises:
            ClusterError: another trainer is gone, or did not come in time.
        """
        self.slot(0)
        for place in self._peers:
            self._send(place)
        _close_descriptors(self._unshown)
        for place in self._peers:
            self._receive(place)
        slots = [self._slot_of(self._memory[place]) for place in range(len(self.members))]
        self._turn = (self._turn + 1) % _SLOTS
        return slots

    def _slot_of(self, memory: mmap.mmap) -> memoryview:
        size = len(memory) // _SLOTS
        return memoryview(memory)[self._turn * size : (self._turn + 1) * size]

    def _grow(self, num_bytes: int) -> None:
        """Take larger memory; the others get it with the next signal, when they have read what was before."""
        _close_descriptors(self._unshown)
        self._unshown.append(descriptor := create_memory(_SLOTS * _PAGE * max(1, -(-num_bytes // _PAGE))))
        self._memory[self.place] = mmap.mmap(descriptor, 0)

    def _send(self, place: int) -> None:
        try:
            socket.send_fds(self._peers[place], [_WRITTEN], self._unshown)
        except OSError as error:
            raise self._gone(place, error) from error

    def _receive(self, place: int) -> None:
        try:
            said, descriptors, _, _ = socket.recv_fds(self._peers[place], 1, 1)
        except OSError as error:
            raise self._gone(place, error) from error
        for descriptor in descriptors:
            try:
                self._memory[place] = map_memory(descriptor)
            except (OSError, ValueError) as error:
                raise ClusterError(
                    f"{self.members[place]} shares memory that cannot be used: {error}"
                ) from error
            finally:
                os.close(descriptor)
        if said != _WRITTEN:
            raise self._gone(place)

    def _gone(self, place: int, error: OSError | None = None) -> ClusterError:
        if isinstance(error, TimeoutError):
            return ClusterError(
                f"{self.members[place]}, of this host, did not come in cluster.timeout_seconds"
            )
        return ClusterError(f"{self.members[place]}, of this host, is gone while a step is taken together")


class _Card(NamedTuple):
    """What a trainer says of itself: where it is, and how it is reached there.

    Attributes:
        host: what processes that can share memory have in common; empty where this one may not.
        name: of the socket on which it listens, in hexadecimal digits; so the ``token`` that its callers say.
    """

    host: str
    name: str
    token: str
    trainer: int


def _exchange(card: _Card, group: dist.ProcessGroup) -> list[_Card]:
    """The cards of all of the group, by rank."""
    text = json.dumps(card).encode().ljust(_CARD_BYTES)
    assert len(text) == _CARD_BYTES, "a card has a fixed size"
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cards = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([cards], [own]).wait()
    return [_Card(*json.loads(bytes(each.tolist()))) for each in cards]


def _call(card: _Card, place: int) -> socket.socket:
    """A connection to the trainer that gave ``card``."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(bytes.fromhex(card.name))
    peer.sendall(bytes([place]) + bytes.fromhex(card.token))
    return peer


def _accept(
    listener: socket.socket, token: bytes, expected: range, deadline: float
) -> dict[int, socket.socket]:
    """The next connection and its place; nothing where it is of no member: any process can connect."""
    listener.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        peer, _ = listener.accept()
    except TimeoutError:
        raise ClusterError("a trainer of this host did not come to share memory in time") from None
    if not is_same_user(peer):  # others are not waited for
        peer.close()
        return {}
    hello, until = b"", time.monotonic() + _HELLO_SECONDS
    with suppress(OSError):  # it has said too little in that time
        while missing := 1 + len(token) - len(hello):
            peer.settimeout(max(0.001, until - time.monotonic()))
            if not (came := peer.recv(missing)):
                break
            hello += came
    if hmac.compare_digest(hello[1:], token) and hello[0] in expected:
        return {hello[0]: peer}
    peer.close()
    return {}


def _close(peers: Iterable[socket.socket], descriptors: list[int]) -> None:
    for peer in peers:
        peer.close()
    _close_descriptors(descriptors)


def _close_descriptors(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
