"""The update barrier where messages overtake each other: all is answered, and applied in order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.barriers import Applied, Barrier, answer, barrier, give, nothing
from torch.futures import Future

from hybrid.steps.rules import UpdateMode
from hybrid.steps.ticket import Purpose, Ticket

NUM_TRAINERS, NUM_PARTS, NUM_EPOCHS, NUM_STEPS = 2, 2, 3, 4


class Trainer:
    """Looks up two steps ahead, as ``hybrid.training.feed.Feed`` does; its messages lie in ``in_flight``."""

    def __init__(self, each: Barrier, index: int, chance: random.Random) -> None:
        self.in_flight: list[Callable[[], None]] = []
        self._each = each
        self._index = index
        self._chance = chance
        self._answers: dict[int, list[Future[None]]] = {}
        self._step = self._first = self._end = self._last_end = 0
        self.has_finished = False

    def begin(self, first: int, end: int, last_end: int) -> None:
        """Train from step ``first`` to before ``end``, while others go on to before ``last_end``."""
        self._step, self._first, self._end, self._last_end = first, first, end, last_end
        self._answers = {step: [] for step in range(first, end)}
        for step in (first, first + 1):
            if not self._ends_at(step):
                self.in_flight += [self._lookup(step, part) for part in range(NUM_PARTS)]

    def rejoin(self, step: int) -> None:
        if self.has_finished:
            self._each.rejoin(self._index, step)
            self.has_finished = False

    def _ends_at(self, step: int) -> bool:
        """Whether there is nothing to look up for a step; the barrier is told of the first such step."""
        if self._end <= step < self._last_end and not self.has_finished:
            self._each.finish(self._index, step)
            self.has_finished = True
        return step >= self._end

    def unanswered(self) -> list[Future[None]]:
        return [lookup for lookups in self._answers.values() for lookup in lookups if not lookup.done()]

    def can_step(self) -> bool:
        if self._step == self._end:
            return False
        lookups = self._answers[self._step]
        return len(lookups) == NUM_PARTS and all(lookup.done() for lookup in lookups)

    def take_step(self) -> None:
        step, self._step = self._step, self._step + 1
        is_last = self._ends_at(step + 2)
        self.in_flight += [self._exchange(step, part, is_last) for part in range(NUM_PARTS)]

    def _lookup(self, step: int, part: int) -> Callable[[], None]:
        version = max(self._first, step - 1)
        ticket = Ticket(self._index, step, version, part, Purpose.PREFETCH)
        return lambda: self._answers[step].append(self._each.when(ticket, nothing))

    def _exchange(self, step: int, part: int, is_last: bool) -> Callable[[], None]:
        """A step's gradients, with the lookup of the step after the next, if there is one."""
        lookup = nothing if is_last else self._lookup(step + 2, part)
        contribution = f"t{self._index} s{step:02} p{part}"
        followed, here = step + 1 < self._end, self._chance.random() < 0.8

        def arrive() -> None:
            give(self._each, self._index, step, contribution, part=part, followed=followed, updates_here=here)
            lookup()

        return arrive


def train(trainers: list[Trainer], chance: random.Random) -> None:
    """Do whatever can be done next, in any order, until the epoch is over."""
    while True:
        messages = [(t, place) for t in trainers for place in range(len(t.in_flight))]
        steps = [t for t in trainers if t.can_step()]
        if messages and chance.random() < len(messages) / (len(messages) + len(steps)):
            trainer, place = chance.choice(messages)
            trainer.in_flight.pop(place)()
        elif steps:
            chance.choice(steps).take_step()
        elif unanswered := [lookup for t in trainers for lookup in t.unanswered()]:
            answer(unanswered[0])  # by another thread
        else:
            return


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("mode", [UpdateMode.PIPELINED, UpdateMode.ASYNC])
def test_everything_is_answered_and_applied_in_whatever_order_it_arrives(
    mode: UpdateMode, is_even: bool, seed: int
) -> None:
    chance = random.Random(seed)
    applied: Applied = []
    expected: list[list[str]] = [[] for _ in range(NUM_TRAINERS)]
    with barrier(NUM_TRAINERS, applied.append, mode, parts=NUM_PARTS) as each:
        trainers = [Trainer(each, index, chance) for index in range(NUM_TRAINERS)]
        first = 0
        for _ in range(NUM_EPOCHS):
            own_ends = [first + (NUM_STEPS if is_even else chance.randint(0, NUM_STEPS)) for _ in trainers]
            end = max(own_ends)
            for index, (trainer, own_end) in enumerate(zip(trainers, own_ends, strict=True)):
                trainer.begin(first, own_end, end)
                steps = range(first, own_end)
                expected[index] += [f"t{index} s{s:02} p{p}" for s in steps for p in range(NUM_PARTS)]
            train(trainers, chance)
            for index, trainer in enumerate(trainers):
                trainer.rejoin(end)
                answer(each.when(Ticket(index, end, end, purpose=Purpose.PREDICT), nothing))
            first = end
        each.drain()
        assert not each._ledger._served
    for index in range(NUM_TRAINERS):
        own = [share for update in applied for share in update if share.startswith(f"t{index}")]
        assert own == expected[index]
