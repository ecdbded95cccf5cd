"""Sums of gradients in memory that the trainers of one host share.

::

    rank 0   write its slot, signal all ─┐ after the signals of all:
                                         ├ read the slots of all
    rank 1   write its slot, signal all ─┘

Each trainer has two slots, and uses them alternately. A trainer signals sum n + 1 only after it has read all
slots of sum n. So once all signals of sum n + 1 have arrived, sum n + 2 may overwrite the slots of sum n. A
sum thus needs one signal in each direction, and no lock. A signal is a byte on a Unix socket. The socket also
reports the end of a process. The memory has no name. The kernel frees it when the last process closes it.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.errors import ClusterError
from hybrid.security.closed_listeners import is_same_user
from hybrid.shared_memory.tensor_blocks import create_memory, host_id, map_memory
from hybrid.topology import Role, RoleKind

MAX_MEMBERS = 8  # each member reads the slots of all members
_ADDRESS_BYTES = 256
_SLOTS = 2
_WRITTEN = b"w"


class SharedSlots:
    """Sums of tensors over the trainers of one host, without TCP messages; created by :meth:`join`.

    Args:
        members: the trainers, by rank in their process group.
        peers: a connected socket for every other rank.
        memory: the memory with both slots of each rank, this trainer's included.
    """

    def __init__(
        self,
        members: Sequence[Role],
        rank: int,
        peers: Mapping[int, socket.socket],
        memory: Mapping[int, mmap.mmap],
    ) -> None:
        self._members = members
        self._rank = rank
        self._peers = peers
        self._memory = memory
        self._turn = 0
        weakref.finalize(self, _close, list(peers.values()))

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, trainer: int, slot_bytes: int, may_share: bool, timeout_seconds: float
    ) -> SharedSlots | None:
        """Connect the trainers of ``group``; all of them call this. Return None if they cannot share memory.

        2 to ``MAX_MEMBERS`` trainers share memory if all have the same ``host_id()``, and set ``may_share``.

        Args:
            group: a process group whose backend supports CPU tensors.
            trainer: this trainer's index in the cluster.
            slot_bytes: size of the largest tensor to sum, in bytes.
            may_share: whether this trainer's gradients are on the CPU.
            timeout_seconds: how long to wait for another trainer, also in :meth:`sum_`.

        Raises:
            ClusterError: a trainer did not connect in time, or the memory cannot be created or mapped.
        """
        if not 2 <= group.size() <= MAX_MEMBERS:
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("")  # Linux chooses a name
            listener.listen(socket.SOMAXCONN)
            host = host_id() if may_share else ""
            text = json.dumps((host, listener.getsockname().hex(), trainer)).encode().ljust(_ADDRESS_BYTES)
            assert len(text) == _ADDRESS_BYTES, "all addresses have the same size"
            sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            received = [torch.empty_like(sent) for _ in range(group.size())]
            group.allgather([received], [sent]).wait()  # for the last trainer
            deadline = time.monotonic() + timeout_seconds
            addresses = (json.loads(bytes(each.tolist())) for each in received)
            hosts, names, trainers = zip(*addresses, strict=True)
            if not may_share or {*hosts} != {host}:
                return None
            members = [Role(RoleKind.TRAINER, index) for index in trainers]
            rank, peers = group.rank(), dict[int, socket.socket]()
            try:
                for each in range(rank):
                    peers[each] = peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    peer.settimeout(timeout_seconds)
                    peer.connect(bytes.fromhex(names[each]))
                    peer.sendall(bytes([rank]))
                while len(peers) < len(members) - 1:
                    listener.settimeout(max(1e-3, deadline - time.monotonic()))
                    peer, _ = listener.accept()
                    peer.settimeout(timeout_seconds)
                    if is_same_user(peer) and (other := peer.recv(1)):
                        peers[other[0]] = peer
                    else:
                        peer.close()
                memory = _exchange_memory(rank, peers, slot_bytes)
            except (OSError, ValueError) as error:
                _close(peers.values())
                rule = "cannot share memory with the other trainers on its host"
                raise ClusterError(f"{members[rank]} {rule}: {error}") from error
        return cls(members, rank, peers, memory)

    def sum_(self, values_N: Tensor) -> None:
        """Replace ``values_N`` by the sum over all trainers, added up in the order of the ranks.

        All trainers make the same calls in the same order, with tensors of equal size and type.

        Args:
            values_N: contiguous, on the CPU.

        Raises:
            ClusterError: another trainer has ended, or has not signaled within the timeout.
        """

        def slot(rank: int) -> Tensor:
            memory = self._memory[rank]
            offset = self._turn * len(memory) // _SLOTS
            return torch.frombuffer(memory, dtype=values_N.dtype, count=values_N.numel(), offset=offset)

        slot(self._rank).copy_(values_N)
        try:
            for rank in self._peers:
                self._peers[rank].sendall(_WRITTEN)
            for rank in self._peers:
                if not self._peers[rank].recv(len(_WRITTEN)):
                    raise ConnectionResetError
        except OSError as error:
            is_late = isinstance(error, TimeoutError)
            reason = "took no step within cluster.timeout_seconds" if is_late else "ended during a step"
            raise ClusterError(f"{self._members[rank]}, on this host, {reason}") from error
        first_N, second_N, *others = map(slot, range(len(self._members)))
        torch.add(first_N, second_N, out=values_N)
        for other_N in others:
            values_N.add_(other_N)
        self._turn = (self._turn + 1) % _SLOTS


def _exchange_memory(rank: int, peers: Mapping[int, socket.socket], slot_bytes: int) -> dict[int, mmap.mmap]:
    size = _SLOTS * -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with os.fdopen(create_memory(size), "rb") as file:
        memory = {rank: mmap.mmap(file.fileno(), 0)}
        for peer in peers.values():
            socket.send_fds(peer, [_WRITTEN], [file.fileno()])
    for other, peer in peers.items():
        _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
        for descriptor in descriptors:  # none if the trainer has ended, which its next signal shows
            with os.fdopen(descriptor, "rb") as file:
                memory[other] = map_memory(descriptor)
    return memory


def _close(peers: Iterable[socket.socket]) -> None:
    for peer in peers:
        peer.close()
