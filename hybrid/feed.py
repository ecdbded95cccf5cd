"""The steps of one trainer: its batches in micro-batches, with their lookups started in time.

::

    sync, async   step s     look up s ── compute s
                  step s+1                          look up s+1 ── compute s+1

    pipelined     step s     look up s+1 ── compute s
                  step s+1   look up s+2 ── compute s+1       rows of s+1: without the update of s
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from hybrid.batch import Batch
from hybrid.clock import StepClock
from hybrid.embedding.lookup import Embeddings, PendingLookup
from hybrid.model import MicroBatch
from hybrid.update import Purpose, Ticket, UpdateMode


class StepInput(NamedTuple):
    """What one trainer computes in one step."""

    batch: Batch
    micro_batches: list[MicroBatch]


class PendingWord(Protocol):
    """An answer on its way."""

    def wait(self) -> object: ...


class Hosting(Protocol):
    """Whoever must be told that a trainer has ended, and goes on: a stub of a worker's tables."""

    def send_finish(self, trainer: int, step: int) -> PendingWord: ...

    def send_rejoin(self, trainer: int, step: int) -> PendingWord: ...


class Feed:
    """Iterates over the steps of one trainer.

    Args:
        embeddings: where vectors come from.
        hosts: the workers that expect gradients for their tables.
        trainer: its index.
        mode, parts: see :class:`hybrid.update.UpdateRules`.
        clock: counts the time spent here.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        hosts: Sequence[Hosting],
        trainer: int,
        mode: UpdateMode,
        parts: int,
        clock: StepClock,
    ) -> None:
        self._embeddings = embeddings
        self._hosts = hosts
        self._trainer = trainer
        self._is_pipelined = mode is UpdateMode.PIPELINED
        self._parts = parts
        self._clock = clock
        self._has_ended = False
        self.begin(iter(()), 0)

    def begin(self, batches: Iterator[Batch], step: int) -> None:
        """Go on with other batches, the first of which is of ``step``; drops what was looked up ahead."""
        self._batches = batches
        self._step = step
        self._upcoming: Batch | None = None  # read already, not looked up yet
        self._ahead: StepInput | None = None  # looked up already

    def rejoin(self) -> None:
        """Take part again from the next step on, where this trainer has ended; once all have come to theirs.

        Nobody may go on until every trainer has called this: one that did could miss this one's gradients.
        """
        if self._has_ended:
            self._has_ended = False
            _await_all([host.send_rejoin(self._trainer, self._step) for host in self._hosts])

    def __iter__(self) -> Iterator[StepInput]:
        return self

    def __next__(self) -> StepInput:
        if self._is_pipelined:
            current = self._next_pipelined()
        else:
            current = self._step_input(self._read(), self._step, self._step)
        self._step += 1
        return current

    def _next_pipelined(self) -> StepInput:
        current, self._ahead = self._ahead, None
        if current is None:
            first = self._read()
            self._upcoming = self._read_if_any()
            current = self._step_input(first, self._step, self._step)
        if self._upcoming is not None:
            batch, self._upcoming = self._upcoming, self._read_if_any()
            self._ahead = self._step_input(batch, self._step + 1, self._step)
        return current

    def _read(self) -> Batch:
        with self._clock.phase("data"):
            return next(self._batches)

    def _read_if_any(self) -> Batch | None:
        with self._clock.phase("data"):
            return next(self._batches, None)

    def _step_input(self, batch: Batch, step: int, version: int) -> StepInput:
        if batch.ended and not self._has_ended:
            self._has_ended = True
            _await_all([host.send_finish(self._trainer, step) for host in self._hosts])
        micro = [self._micro(b, step, version, part) for part, b in enumerate(batch.split(self._parts))]
        return StepInput(batch, micro)

    def _micro(self, batch: Batch, step: int, version: int, part: int) -> MicroBatch:
        dense_ticket = Ticket(self._trainer, step, step, part)
        if batch.ended:
            return MicroBatch(batch, dense_ticket, self._embeddings.nothing)
        start: Callable[[], PendingLookup] = partial(
            self._embeddings.lookup, batch.sparse_features, dense_ticket
        )
        if self._is_pipelined:
            followed = self._upcoming is not None and not self._upcoming.ended
            ticket = Ticket(self._trainer, step, version, part, Purpose.PREFETCH, followed)
            with self._clock.phase("lookup"):
                ahead = self._embeddings.lookup(batch.sparse_features, ticket)
            start = partial(_given, ahead)
        return MicroBatch(batch, dense_ticket, start)


def _await_all(words: Sequence[PendingWord]) -> None:
    for word in words:
        word.wait()


def _given(lookup: PendingLookup) -> PendingLookup:
    return lookup


def evened(
    batches: Iterator[Batch], empty: Batch, group: dist.ProcessGroup, device: torch.device
) -> Iterator[Batch]:
    """Batches of trainers that have different numbers of them, or of different sizes, step by step.

    Each step's ``global_size`` becomes the samples of all trainers together. A trainer that has run out
    gets empty batches that say so, until all have: it goes on reducing gradients with the others.

    Args:
        batches: this trainer's own.
        empty: a batch of no samples.
        group: of all trainers, each of which must iterate.
        device: on which ``group`` reduces.
    """
    while True:
        batch = next(batches, None)
        sizes = torch.tensor([batch is not None, 0 if batch is None else len(batch.labels)], device=device)
        dist.all_reduce(sizes, group=group)
        num_going_on, global_size = sizes.tolist()
        if not num_going_on:
            return
        yield (batch or empty)._replace(global_size=global_size, ended=batch is None)
