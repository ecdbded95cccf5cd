"""Aggregate per host: the trainers of one host send each worker one request.

::

    trainer 0 ──────────────────────────┬── one request for all of them ──► worker 0
    trainer 1 ── shared memory ──►──────┤
    trainer 2 ── shared memory ──►──────┴── one request for all of them ──► worker 1

The responses take the same path back. With T trainers on H hosts and W workers, a step sends H * W requests
instead of T * W. A worker gets the same segments, in the order of trainers, and computes the same bits. All
trainers of a host take part in every round. In a round, each trainer has one segment, or none, per worker.

Trainers exchange one packet per pair of ranks. A slot of shared memory holds::

    start of the packet for each rank   8 bytes each, 0 for none
    packet: length of its head          8 bytes
            head                        a pickle of numbers, text, tuples and lists; it names no class
            tensors                     the bytes of each
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from hybrid.config import RunConfig
from hybrid.primitives.deferred_response import ObservableResult
from hybrid.security.rejected_messages import PlainUnpickler
from hybrid.transport.rpc import endpoints
from hybrid.transport.rpc.pending_calls import PendingTensors
from hybrid.transport.rpc.stubs import RemoteTables
from hybrid.transport.shared_memory.shared_slots import SharedSlots
from hybrid.transport.shared_memory.tensor_blocks import (
    align,
    layout_of,
    num_bytes,
    read_tensors,
    write_tensors,
)
from hybrid.transport.socket.socket_calls import Reply

# Exchanging segments and responses costs about as much as two messages (docs/performance.md).
_EXCHANGE_COST = 2
_MIN_SAVING = 4
_SENDER = 0  # rank of the trainer that sends the requests
_NUMBER = struct.Struct("<Q")


def can_aggregate(config: RunConfig) -> bool:
    """Whether all trainers of a run take part in every round, as aggregation requires."""
    return config.train.update != "sync" and config.dense.ddp != "none"


def saves_work(num_trainers: int, num_workers: int) -> bool:
    """Whether aggregation saves work for ``num_trainers`` on one host."""
    return (num_trainers - 1) * (num_workers - _EXCHANGE_COST) >= _MIN_SAVING


class Packet(NamedTuple):
    """Values and tensors that one trainer sends to another.

    Attributes:
        values: numbers, text, and tuples and lists of these.
    """

    values: list[Any]
    tensors: list[Tensor]


def all_to_all(memory: SharedSlots, outgoing: Mapping[int, Packet]) -> dict[int, Packet]:
    """Exchange packets by rank; all members call this in the same turn.

    Received tensors are in the memory of their sender, and are valid until the next turn of ``memory``.

    Raises:
        ClusterError: another trainer has ended, or is late.
    """
    packets = []
    starts = [0] * len(memory.members)
    end = table = _NUMBER.size * len(starts)
    for rank, (values, tensors) in outgoing.items():
        if rank != memory.rank:
            layout = layout_of(tensors)
            head = pickle.dumps((values, layout), pickle.HIGHEST_PROTOCOL)
            start = starts[rank] = align(end)
            tensors_start = align(start + _NUMBER.size + len(head))
            packets.append((start, head, tensors_start, tensors))
            end = tensors_start + num_bytes(layout)
    slot = memory.slot(end)
    slot[:table] = struct.pack(f"<{len(starts)}Q", *starts)
    for start, head, tensors_start, tensors in packets:
        _NUMBER.pack_into(slot, start, len(head))
        slot[start + _NUMBER.size : start + _NUMBER.size + len(head)] = head
        write_tensors(tensors, slot, tensors_start)
    incoming = {}
    for rank, slot in enumerate(memory.publish()):
        (start,) = _NUMBER.unpack_from(slot, _NUMBER.size * memory.rank)
        if rank == memory.rank and rank in outgoing:
            incoming[rank] = outgoing[rank]
        elif start:
            (length,) = _NUMBER.unpack_from(slot, start)
            end = start + _NUMBER.size + length
            values, layout = PlainUnpickler(io.BytesIO(slot[start + _NUMBER.size : end])).load()
            incoming[rank] = Packet(values, read_tensors(slot, align(end), layout))
    return incoming


class HostAggregation:
    """The aggregation of requests on one trainer; for one thread at a time.

    Args:
        memory: the slots that the trainers share.
        tables: the tables of all workers, in the same order on each trainer.
    """

    def __init__(self, memory: SharedSlots, tables: Sequence[RemoteTables]) -> None:
        self._memory = memory
        self._workers = {each.role.index: each for each in tables}
        self._round = _Round()
        self._sent: deque[_Round] = deque()

    def sources(self) -> dict[int, AggregatedTables]:
        """Return a stub for every worker's tables, by index."""
        return {index: AggregatedTables(tables, self) for index, tables in self._workers.items()}

    def call(self, worker: int, segment: endpoints.PlainSegment | None, tensors: Sequence[Tensor]) -> Reply:
        """Add a segment of :func:`endpoints.exchange`, or None; the last call of a round sends them all."""
        if segment is not None:
            self._round.segments.values.append((worker, segment, len(tensors)))
            self._round.segments.tensors.extend(tensors)
        current = self._round
        current.replies[worker] = reply = Reply(self._receive)
        if len(current.replies) < len(self._workers):
            return reply
        # Pass the segments to the sender; on the sender, send the requests.
        segments: dict[int, list[endpoints.PlainSegment]] = {}
        tensors_of: dict[int, list[Tensor]] = {}
        for rank, packet in all_to_all(self._memory, {_SENDER: current.segments}).items():
            rest = iter(packet.tensors)
            for each, segment_of_rank, num_tensors in packet.values:
                segments.setdefault(each, []).append(segment_of_rank)
                tensors_of.setdefault(each, []).extend(islice(rest, num_tensors))
                current.receivers.setdefault(each, []).append((rank, len(segment_of_rank[3])))
        current.segments = Packet([], [])  # free the tensors before the responses arrive
        for each, of_worker in segments.items():
            current.responses[each] = self._workers[each].send_segments(of_worker, tensors_of[each])
        self._sent.append(current)
        self._round = _Round()
        return reply

    def _receive(self, reply: Reply) -> None:
        """Complete one round after the other with the workers' responses, until ``reply`` is complete."""
        while not reply.is_done:
            current = self._sent.popleft()
            outgoing: dict[int, Packet] = {}
            for worker, response in current.responses.items():
                error, tensors = None, []
                try:
                    tensors = response.wait()
                except RuntimeError as raised:  # reported to each receiver
                    error = str(raised)
                rest = iter(tensors)
                for rank, num_tensors in current.receivers[worker]:
                    packet = outgoing.setdefault(rank, Packet([], []))
                    own = list(islice(rest, num_tensors))
                    packet.values.append((worker, error, len(own)))
                    packet.tensors.extend(own)
            for rank, packet in all_to_all(self._memory, outgoing).items():
                is_own = rank == self._memory.rank
                rest = iter(packet.tensors if is_own else [each.clone() for each in packet.tensors])
                for worker, error, num_tensors in packet.values:
                    current.replies[worker].complete(list(islice(rest, num_tensors)), error)
            for each in current.replies.values():
                each.complete([])  # workers to which this trainer sent no segment


@dataclass
class _Round:
    """One request of every trainer to each worker.

    Attributes:
        segments: the segments of this trainer.
        replies: the replies to these segments, by worker.
        responses: the responses of the workers; on the sender only.
        receivers: for each worker, the ranks that share its response, and their numbers of tensors.
    """

    segments: Packet = field(default_factory=lambda: Packet([], []))
    replies: dict[int, Reply] = field(default_factory=dict)
    responses: dict[int, ObservableResult[list[Tensor]]] = field(default_factory=dict)
    receivers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class AggregatedTables(RemoteTables):
    """A stub of a worker's tables whose requests are sent with those of the other trainers of the host."""

    def __init__(self, tables: RemoteTables, aggregation: HostAggregation) -> None:
        super().__init__(tables.role, tables.number)
        self._aggregation = aggregation

    def skip(self) -> ObservableResult[list[Tensor]]:
        """See :meth:`TableSource.skip`."""
        return PendingTensors(self.role, self._aggregation.call(self.role.index, None, ()))

    def send_segments(
        self, segments: Sequence[endpoints.PlainSegment], tensors: Sequence[Tensor]
    ) -> ObservableResult[Any]:
        """Add one segment to the aggregated request."""
        (segment,) = segments
        return self._aggregation.call(self.role.index, segment, tensors)
