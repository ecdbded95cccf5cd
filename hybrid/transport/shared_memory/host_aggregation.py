"""The trainers of one host ask each worker together, through one of them.

::

    trainer 0 ──────────────────────────────┬── one message for all of them ──► worker 0
    trainer 1 ── in memory of the host ──►──┤
    trainer 2 ── in memory of the host ──►──┴── one message for all of them ──► worker 1

Answers come back by the same way. Of T trainers on H hosts and W workers, a step sends H * W messages, not
T * W. A worker computes with the same parts, trainer by trainer, and so the same bits. All trainers of a host
take the same rounds: in each, every one has something for every worker, or says that it has nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from hybrid.config import RunConfig
from hybrid.primitives.deferred_response import Watched
from hybrid.transport.rpc import endpoints
from hybrid.transport.rpc.pending_calls import PendingTensors
from hybrid.transport.rpc.reply import Reply
from hybrid.transport.rpc.stubs import RemoteTables
from hybrid.transport.shared_memory.all_to_all import Packet, all_to_all
from hybrid.transport.shared_memory.shared_block import SharedMemory

# To hand parts over, and to be handed the answers, costs about what two messages cost (docs/performance.md).
_HANDING = 2
_LEAST_SPARED = 4
_ASKER = 0  # the place of the one that asks


def may_combine(config: RunConfig) -> bool:
    """Whether the trainers of a run take the same rounds, and may ask together."""
    return config.train.update != "sync" and config.dense.ddp != "none"


def pays(num_trainers: int, num_workers: int) -> bool:
    """Whether so many trainers of a host ask so many workers with less work together than each for itself."""
    return (num_trainers - 1) * (num_workers - _HANDING) >= _LEAST_SPARED


class Combining:
    """One trainer's place among those that ask together; for one thread at a time.

    Args:
        memory: that they share.
        tables: of all workers that each of them asks; the same on each, in the same order.
    """

    def __init__(self, memory: SharedMemory, tables: Sequence[RemoteTables]) -> None:
        self._memory = memory
        self._workers = {each.role.index: each for each in tables}
        self._round = _Round()
        self._sent: deque[_Round] = deque()

    def sources(self) -> dict[int, CombinedTables]:
        """For every worker, whoever answers for it."""
        return {index: CombinedTables(tables, self) for index, tables in self._workers.items()}

    def call(self, worker: int, part: endpoints.PlainPart | None, tensors: Sequence[Tensor]) -> CombinedReply:
        """Send a part of :func:`calls.exchange`, or nothing, once there is one for each worker."""
        if part is not None:
            self._round.parts.values.append((worker, part, len(tensors)))
            self._round.parts.tensors.extend(tensors)
        self._round.replies[worker] = reply = CombinedReply(self)
        if len(self._round.replies) == len(self._workers):
            self._ask(self._round)
            self._sent.append(self._round)
            self._round = _Round()
        return reply

    def _ask(self, of: _Round) -> None:
        """Hand the parts to the one that asks, and ask where this trainer is that one."""
        parts: dict[int, list[endpoints.PlainPart]] = {}
        tensors: dict[int, list[Tensor]] = {}
        for place, packet in all_to_all(self._memory, {_ASKER: of.parts}).items():
            rest = iter(packet.tensors)
            for worker, part, num_tensors in packet.values:
                parts.setdefault(worker, []).append(part)
                tensors.setdefault(worker, []).extend(islice(rest, num_tensors))
                of.takers.setdefault(worker, []).append((place, len(part[3])))
        of.parts = Packet([], [])  # would be held until the answers come
        for worker, of_worker in parts.items():
            of.answers[worker] = self._workers[worker].carry_parts(of_worker, tensors[worker])

    def collect(self, reply: CombinedReply) -> None:
        """Take in the answers to one round after the other, until this one is there."""
        while not reply.is_done:
            self._hand_out(self._sent.popleft())

    def _hand_out(self, of: _Round) -> None:
        """Take in the answers to a round, from the workers or from the one that has asked them."""
        outgoing: dict[int, Packet] = {}
        for worker, answer in of.answers.items():
            error, tensors = None, []
            try:
                tensors = answer.wait()
            except RuntimeError as raised:  # each taker's to know
                error = str(raised)
            rest = iter(tensors)
            for place, num_tensors in of.takers[worker]:
                packet = outgoing.setdefault(place, Packet([], []))
                own = list(islice(rest, num_tensors))
                packet.values.append((worker, error, len(own)))
                packet.tensors.extend(own)
        for place, packet in all_to_all(self._memory, outgoing).items():
            is_own = place == self._memory.place
            rest = iter(packet.tensors if is_own else [each.clone() for each in packet.tensors])
            for worker, error, num_tensors in packet.values:
                of.replies[worker].complete(list(islice(rest, num_tensors)), error)
        for reply in of.replies.values():
            reply.complete([])  # to those that were nothing


@dataclass
class _Round:
    """What the trainers send to each worker once.

    Attributes:
        parts: what this trainer sends.
        replies: to it, by worker.
        answers: of the workers, where this trainer asks them.
        takers: whom these are for: place, and number of tensors.
    """

    parts: Packet = field(default_factory=lambda: Packet([], []))
    replies: dict[int, CombinedReply] = field(default_factory=dict)
    answers: dict[int, Watched[list[Tensor]]] = field(default_factory=dict)
    takers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class CombinedReply(Reply):
    """The answer to one part."""

    __slots__ = ("_combining",)

    def __init__(self, combining: Combining) -> None:
        super().__init__()
        self._combining = combining

    def _take(self) -> None:
        self._combining.collect(self)


class CombinedTables(RemoteTables):
    """A stub of a worker's tables to which lookups ahead, and gradients, go with those of other trainers."""

    def __init__(self, tables: RemoteTables, combining: Combining) -> None:
        super().__init__(tables.role, tables.module)
        self._combining = combining

    def skip(self) -> Watched[list[Tensor]]:
        """See :meth:`TableSource.skip`."""
        return PendingTensors(self.role, self._combining.call(self.role.index, None, ()))

    def _carry_part(self, part: endpoints.PlainPart, tensors: Sequence[Tensor]) -> Watched[Any]:
        return self._combining.call(self.role.index, part, tensors)
