"""Memory that the trainers of one host share, and the signals by which they take turns.

::

    rank 0   write its slot, signal all ─┐ all have signaled:
                                         ├ read the slots of all
    rank 1   write its slot, signal all ─┘

Each trainer has two slots, and uses them in turn: when all have written the next one, all have read the one
before. So a turn takes one signal in each direction, and no lock. A signal is a byte on a Unix socket, which
also reports at once that a process is gone. The memory has no name, and ends with the last process that has
it.
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
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid.errors import ClusterError
from hybrid.security.rejected_messages import RejectedMessage
from hybrid.topology import Role, RoleKind
from hybrid.transport.shared_memory.lent_blocks import create_memory, map_memory, own_host
from hybrid.transport.socket.handshake import Peer, accept_peers

MOST_MEMBERS = 8  # every one reads what all have written
_CARD_BYTES = 256
_TOKEN_BYTES = 16
_SLOTS = 2
_PAGE = mmap.PAGESIZE
_WRITTEN = b"w"


class SharedMemory:
    """One trainer's view, created by :meth:`join`. All members call :meth:`publish` equally often, in order.

    Args:
        rank: of this trainer among the members.
        peers: a connected socket for every other rank.
        members: the trainers, by rank.
        timeout_seconds: how long to wait for any of them.
    """

    def __init__(
        self, rank: int, peers: Mapping[int, socket.socket], members: Sequence[Role], timeout_seconds: float
    ) -> None:
        self.rank = rank
        self.members = members
        self._peers = dict(sorted(peers.items()))
        self._memory: dict[int, mmap.mmap] = {}
        self._unsent: list[int] = []  # the descriptor of memory that the others do not have yet
        self._turn = 0
        for peer in peers.values():
            peer.settimeout(timeout_seconds)
        weakref.finalize(self, _close, list(peers.values()), self._unsent)

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, trainer: int, may_share: bool, timeout_seconds: float
    ) -> SharedMemory | None:
        """Connect the trainers of ``group`` that are on one host; all of the group call this.

        More than ``MOST_MEMBERS`` on a host form several groups of members.

        Args:
            group: of a backend for tensors on the CPU.
            trainer: this trainer's index.
            may_share: whether this trainer uses the memory.

        Returns:
            None for a trainer that is alone.

        Raises:
            ClusterError: a trainer did not connect in time.
        """
        token, deadline = secrets.token_bytes(_TOKEN_BYTES), time.monotonic() + timeout_seconds
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("")  # Linux chooses a name
            listener.listen(socket.SOMAXCONN)
            host, name = own_host() if may_share else "", listener.getsockname().hex()
            own = _Card(host, name, token.hex(), trainer)
            text = json.dumps(own).encode().ljust(_CARD_BYTES)
            assert len(text) == _CARD_BYTES, "a card has a fixed size"
            sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            received = [torch.empty_like(sent) for _ in range(group.size())]
            group.allgather([received], [sent]).wait()
            cards = [_Card(*json.loads(bytes(each.tolist()))) for each in received]
            same_host = [each for each in cards if each.host == host] if host else [own]
            first = same_host.index(own) // MOST_MEMBERS * MOST_MEMBERS
            cards = same_host[first : first + MOST_MEMBERS]
            if len(cards) < 2:
                return None
            rank = cards.index(own)
            expected = set(range(rank + 1, len(cards)))

            def accept(peer: Peer) -> tuple[int, socket.socket]:
                theirs = peer.hello[0]
                if not hmac.compare_digest(peer.hello[1:], token) or theirs not in expected - accepted:
                    raise RejectedMessage("it is no member")
                accepted.add(theirs)
                return theirs, peer.socket

            accepted: set[int] = set()
            peers = {}
            for each in range(rank):
                peers[each] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peers[each].connect(bytes.fromhex(cards[each].name))
                peers[each].sendall(bytes([rank]) + bytes.fromhex(cards[each].token))
            peers |= accept_peers((listener,), 1 + len(token), accept, expected, deadline)
        if accepted != expected:
            _close(peers.values(), [])
            raise ClusterError("a trainer of this host did not connect in time to share memory")
        return cls(rank, peers, [Role(RoleKind.TRAINER, each.trainer) for each in cards], timeout_seconds)

    def slot(self, num_bytes: int) -> memoryview:
        """Return this trainer's slot of the turn, of at least so many bytes."""
        if self.rank not in self._memory or num_bytes > len(self._memory[self.rank]) // _SLOTS:
            # The others get larger memory with the next signal, after they have read the slot before.
            _close((), self._unsent)
            pages = max(1, -(-num_bytes // _PAGE))
            self._unsent.append(descriptor := create_memory(_SLOTS * _PAGE * pages))
            self._memory[self.rank] = mmap.mmap(descriptor, 0)
        return self._slot_of(self._memory[self.rank])

    def publish(self) -> list[memoryview]:
        """Wait until all have written their slots, and return these by rank; valid until the next turn.

        Raises:
            ClusterError: another trainer is gone, or late.
        """
        self.slot(0)
        for rank, peer in self._peers.items():
            try:
                socket.send_fds(peer, [_WRITTEN], self._unsent)
            except OSError as error:
                raise self._lost(rank, error) from error
        _close((), self._unsent)
        for rank, peer in self._peers.items():
            try:
                signal, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
            except OSError as error:
                raise self._lost(rank, error) from error
            try:
                for descriptor in descriptors:
                    self._memory[rank] = map_memory(descriptor)
            except (OSError, ValueError) as error:
                raise ClusterError(
                    f"{self.members[rank]} shares memory that cannot be used: {error}"
                ) from error
            finally:
                _close((), descriptors)
            if signal != _WRITTEN:
                raise self._lost(rank)
        slots = [self._slot_of(self._memory[rank]) for rank in range(len(self.members))]
        self._turn = (self._turn + 1) % _SLOTS
        return slots

    def _slot_of(self, memory: mmap.mmap) -> memoryview:
        size = len(memory) // _SLOTS
        return memoryview(memory)[self._turn * size : (self._turn + 1) * size]

    def _lost(self, rank: int, error: OSError | None = None) -> ClusterError:
        if isinstance(error, TimeoutError):
            rule = "of this host, did not come in cluster.timeout_seconds"
        else:
            rule = "of this host, is gone during a step"
        return ClusterError(f"{self.members[rank]}, {rule}")


class _Card(NamedTuple):
    """Where a trainer is, and how others of its host connect.

    Attributes:
        host: see :func:`own_host`; empty if this trainer does not share.
        name: of its Unix socket, in hexadecimal digits.
        token: that members send, in hexadecimal digits.
    """

    host: str
    name: str
    token: str
    trainer: int


def _close(peers: Iterable[socket.socket], descriptors: list[int]) -> None:
    for peer in peers:
        peer.close()
    while descriptors:
        os.close(descriptors.pop())
