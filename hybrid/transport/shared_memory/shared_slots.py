"""Memory that the trainers of one host share, and the signals that synchronize them.

::

    rank 0   write its slot, signal all ─┐ after the signals of all:
                                         ├ read the slots of all
    rank 1   write its slot, signal all ─┘

In each turn, every trainer writes one of its two slots, alternately. After all trainers have written the next
slot, all have read the previous one. So a turn needs one signal in each direction, and no lock. A signal is a
byte on a Unix socket, which also reports at once that a process has ended. The memory has no name, and the
kernel frees it when the last process closes it.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid.errors import ClusterError
from hybrid.security.closed_listeners import is_same_user
from hybrid.topology import Role, RoleKind
from hybrid.transport.shared_memory.tensor_blocks import create_memory, host_id, map_memory

MAX_MEMBERS = 8  # each member reads the slots of all members
_ADDRESS_BYTES = 256
_SLOTS = 2
_PAGE = mmap.PAGESIZE
_WRITTEN = b"w"


class SharedSlots:
    """One trainer's view of the slots, created by :meth:`join`.

    All members call :meth:`publish` once in each turn.

    Args:
        rank: rank of this trainer among the members.
        peers: a connected socket for every other rank.
        members: the trainers, by rank.
        timeout_seconds: how long to wait for another member.
    """

    def __init__(
        self, rank: int, peers: Mapping[int, socket.socket], members: Sequence[Role], timeout_seconds: float
    ) -> None:
        self.rank = rank
        self.members = members
        self._peers = dict(sorted(peers.items()))
        self._memory: dict[int, mmap.mmap] = {}
        self._unsent: list[int] = []  # the descriptor of new memory, until it is sent
        self._turn = 0
        for peer in peers.values():
            peer.settimeout(timeout_seconds)
        weakref.finalize(self, _close, list(peers.values()), self._unsent)

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, trainer: int, may_share: bool, timeout_seconds: float
    ) -> SharedSlots | None:
        """Connect the trainers of ``group`` that are on one host; all trainers of the group call this.

        More than ``MAX_MEMBERS`` trainers of a host form several sets of members.

        Args:
            group: a process group whose backend supports CPU tensors.
            trainer: this trainer's index.
            may_share: whether this trainer takes part in sharing.

        Returns:
            The slots; None if this trainer shares with no other.

        Raises:
            ClusterError: a trainer did not connect in time.
        """
        deadline = time.monotonic() + timeout_seconds
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("")  # Linux chooses a name
            listener.listen(socket.SOMAXCONN)
            host, name = host_id() if may_share else "", listener.getsockname().hex()
            own = _TrainerAddress(host, name, trainer)
            text = json.dumps(own).encode().ljust(_ADDRESS_BYTES)
            assert len(text) == _ADDRESS_BYTES, "all addresses have the same size"
            sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            received = [torch.empty_like(sent) for _ in range(group.size())]
            group.allgather([received], [sent]).wait()
            addresses = [_TrainerAddress(*json.loads(bytes(each.tolist()))) for each in received]
            same_host = [each for each in addresses if each.host == host] if host else [own]
            first = same_host.index(own) // MAX_MEMBERS * MAX_MEMBERS
            addresses = same_host[first : first + MAX_MEMBERS]
            if len(addresses) < 2:
                return None
            rank = addresses.index(own)
            peers = {}
            for each in range(rank):
                peers[each] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peers[each].connect(bytes.fromhex(addresses[each].name))
                peers[each].sendall(bytes([rank]))
            while len(peers) < len(addresses) - 1:
                listener.settimeout(max(1e-3, deadline - time.monotonic()))
                try:
                    peer, _ = listener.accept()
                    peer.settimeout(timeout_seconds)
                    if is_same_user(peer) and (other := peer.recv(1)):
                        peers[other[0]] = peer
                    else:
                        peer.close()
                except OSError as error:
                    _close(peers.values(), [])
                    message = "a trainer on this host did not connect in time to share memory"
                    raise ClusterError(message) from error
        return cls(rank, peers, [Role(RoleKind.TRAINER, each.trainer) for each in addresses], timeout_seconds)

    def slot(self, num_bytes: int) -> memoryview:
        """Return this trainer's slot of the current turn, of at least ``num_bytes``."""
        if self.rank not in self._memory or num_bytes > len(self._memory[self.rank]) // _SLOTS:
            # The next signal carries the descriptor of the larger memory. By then, the others have read the
            # old one.
            _close((), self._unsent)
            pages = max(1, -(-num_bytes // _PAGE))
            self._unsent.append(descriptor := create_memory(_SLOTS * _PAGE * pages))
            self._memory[self.rank] = mmap.mmap(descriptor, 0)
        return self._slot_of(self._memory[self.rank])

    def publish(self) -> list[memoryview]:
        """Wait until all slots of this turn are written; return them by rank, valid until the next turn.

        Raises:
            ClusterError: another trainer has ended, or is late.
        """
        self.slot(0)
        for rank, peer in self._peers.items():
            try:
                socket.send_fds(peer, [_WRITTEN], self._unsent)
            except OSError as error:
                raise self._loss_error(rank, error) from error
        _close((), self._unsent)
        for rank, peer in self._peers.items():
            try:
                signal, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
            except OSError as error:
                raise self._loss_error(rank, error) from error
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
                raise self._loss_error(rank)
        slots = [self._slot_of(self._memory[rank]) for rank in range(len(self.members))]
        self._turn = (self._turn + 1) % _SLOTS
        return slots

    def _slot_of(self, memory: mmap.mmap) -> memoryview:
        size = len(memory) // _SLOTS
        return memoryview(memory)[self._turn * size : (self._turn + 1) * size]

    def _loss_error(self, rank: int, error: OSError | None = None) -> ClusterError:
        if isinstance(error, TimeoutError):
            reason = "did not respond within cluster.timeout_seconds"
        else:
            reason = "ended during a step"
        return ClusterError(f"{self.members[rank]}, on this host, {reason}")


class _TrainerAddress(NamedTuple):
    """The host of a trainer, and the socket on which it listens.

    Attributes:
        host: see :func:`host_id`; empty if this trainer does not share.
        name: name of its Unix socket, in hexadecimal digits.
    """

    host: str
    name: str
    trainer: int


def _close(peers: Iterable[socket.socket], descriptors: list[int]) -> None:
    for peer in peers:
        peer.close()
    while descriptors:
        os.close(descriptors.pop())
