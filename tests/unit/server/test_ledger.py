"""The rules of the update barrier: what an update is of, and what a lookup sees."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from hybrid.errors import ClusterError
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import Staleness, UpdateMode, UpdateRules
from hybrid.server.ledger import Ledger

SYNC, PIPELINED, ASYNC = UpdateMode


def ledger(num_trainers: int, mode: UpdateMode = SYNC, parts: int = 1, version: int = 0) -> Ledger[str]:
    return Ledger(UpdateRules(num_trainers, mode, parts, timeout_seconds=20.0), version)


def give(
    each: Ledger[str], trainer: int, step: int, part: int = 0, followed: bool = False, now: float = 0.0
) -> None:
    ticket = Ticket(trainer, step, step, part, followed=followed)
    each.enter(ticket, f"t{trainer}s{step}p{part}", step, now)


def serve(each: Ledger[str], trainer: int, step: int) -> None:
    each.serve(Ticket(trainer, step, max(0, step - 1), purpose=Purpose.PREFETCH))


def update(each: Ledger[str]) -> str:
    """What the next update is of, which is applied; nothing where there is none."""
    if (taken := each.begin_update()) is None:
        return ""
    each.end_update()
    return " ".join(taken[1])


def is_ready(each: Ledger[str], version: int, trainer: int = 0) -> bool:
    return each.is_ready(Ticket(trainer, version, version))


def test_one_update_is_made_at_a_time() -> None:
    each = ledger(2, ASYNC)
    give(each, 1, 0)
    assert each.begin_update() == (0, ["t1s0p0"])
    give(each, 0, 0)
    give(each, 1, 1)
    assert each.begin_update() is None
    assert not each.is_idle
    each.end_update()
    assert update(each) == "t0s0p0 t1s1p0"  # what has come meanwhile is one update
    assert (each.version, each.is_idle) == (2, True)


class TestRefusals:
    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_whatever_has_become_of_a_step_nobody_sends_it_twice(self, mode: UpdateMode) -> None:
        each = ledger(2, mode)
        message = r"^trainer 0 sent gradients of step 0 twice$"
        give(each, 0, 0)
        with pytest.raises(ClusterError, match=message):
            give(each, 0, 0)
        give(each, 1, 0)
        assert each.begin_update()
        with pytest.raises(ClusterError, match=message):
            give(each, 0, 0)
        each.end_update()
        with pytest.raises(ClusterError, match=message):
            give(each, 0, 0)
        assert each.is_idle  # what was refused has left nothing
        give(each, 0, 1)

    def test_in_async_mode_every_trainer_has_steps_of_its_own(self) -> None:
        each = ledger(2, ASYNC)
        for step in range(2):
            give(each, 0, step)
            assert update(each)
        give(each, 1, 0)
        with pytest.raises(ClusterError, match=r"^trainer 0 sent gradients of step 1 twice$"):
            give(each, 0, 1)

    def test_nothing_comes_after_a_trainers_end(self) -> None:
        each = ledger(2)
        each.finish(1, 2)
        give(each, 1, 1)
        with pytest.raises(ClusterError, match=r"^trainer 1 sent gradients of step 2 after its end$"):
            give(each, 1, 2)


def steps_of(each: Ledger[str], trainer: int, until: int) -> list[int]:
    """The steps of which a trainer's gradients are taken."""
    steps = []
    for step in range(until):
        try:
            give(each, trainer, step)
        except ClusterError:
            continue
        steps.append(step)
    return steps


class TestAbsences:
    def test_who_has_finished_takes_no_part_until_it_is_back(self) -> None:
        each = ledger(2)
        for first, back in ((2, 4), (5, 7), (8, 8)):
            each.finish(1, first)
            each.rejoin(1, back)
        each.finish(1, 9)
        assert steps_of(each, 1, 12) == [0, 1, 4, 7, 8]
        assert steps_of(each, 0, 12) == list(range(12))

    def test_an_update_is_of_those_who_take_part(self) -> None:
        each = ledger(3)
        for trainer in (2, 1, 0):
            give(each, trainer, 0)
        each.finish(1, 1)
        assert update(each) == "t0s0p0 t1s0p0 t2s0p0"  # its last step has all
        give(each, 2, 1)
        assert not update(each)
        give(each, 0, 1)
        assert update(each) == "t0s1p0 t2s1p0"
        each.rejoin(1, 3)  # while an earlier step is under way
        for step in (2, 3):
            give(each, 2, step)
            give(each, 0, step)
        assert update(each) == "t0s2p0 t2s2p0"
        assert not update(each)
        give(each, 1, 3)
        assert update(each) == "t0s3p0 t1s3p0 t2s3p0"

    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_steps_under_way_stay_those_of_before_an_absence(self, mode: UpdateMode) -> None:
        """A trainer is back, and away again, before what it sent first is applied."""
        each = ledger(1, mode)
        each.finish(0, 1)
        each.rejoin(0, 3)
        each.finish(0, 4)
        each.rejoin(0, 6)
        assert [is_ready(each, version) for version in (0, 1)] == [True, False]
        assert steps_of(each, 0, 8) == [0, 3, 6, 7]

    def test_one_at_some_version_has_all_steps_before_it_behind(self) -> None:
        each = ledger(2, version=4)
        each.rejoin(1, 6)  # has finished before a restart: there is nothing to come back from
        assert steps_of(each, 1, 7) == [4, 5, 6]


class TestTime:
    def test_it_counts_from_the_first_gradients_of_the_present_step(self) -> None:
        each = ledger(3)
        assert each.seconds_left(1000.0) is None
        give(each, 0, 1, now=1000.0)
        assert each.seconds_left(2000.0) is None  # of a later step
        give(each, 1, 0, now=2000.0)
        give(each, 2, 0, now=2019.0)  # which gives the others no more of it
        assert each.seconds_left(2019.5) == 0.5

    def test_who_is_missing_is_named(self) -> None:
        each = ledger(4, parts=2)
        each.finish(3, 0)
        for trainer, part in ((1, 0), (1, 1), (2, 0)):
            give(each, trainer, 0, part)
        message = r"^step 0: no gradients from trainer 0, trainer 2 for 20 s \(cluster.timeout_seconds\)$"
        with pytest.raises(ClusterError, match=message):
            each.seconds_left(20.0)

    def test_who_waits_for_a_lookup_is_missing(self) -> None:
        each = ledger(2, PIPELINED)
        for trainer in range(2):
            give(each, trainer, 0, followed=True)
        serve(each, 0, 1)
        with pytest.raises(ClusterError, match="no gradients from trainer 1 for"):
            each.seconds_left(20.0)

    def test_who_has_finished_is_not_waited_for(self) -> None:
        each = ledger(2)
        give(each, 0, 0)
        give(each, 1, 0)
        assert each.begin_update()
        assert each.seconds_left(1000.0) is None  # all have come
        each.end_update()
        give(each, 0, 1)
        each.finish(0, 1)
        assert each.seconds_left(1000.0) is None

    def test_in_async_mode_nobody_waits_for_others(self) -> None:
        each = ledger(2, ASYNC)
        give(each, 0, 0)
        assert each.seconds_left(1000.0) is None


@pytest.mark.parametrize(
    ("read_at", "staleness"),
    [
        ({(0, 0): 5, (1, 0): 2, (2, 0): 4}, Staleness(3, 4, 3)),
        ({(0, 0): 4, (0, 1): 2}, Staleness(1, 3, 3)),
        ({(0, 0): 2, (0, 1): 4}, Staleness(1, 3, 3)),
    ],
    ids=["every trainer counts", "by its oldest part, the last", "or the first"],
)
def test_staleness_is_the_updates_between_reading_rows_and_updating_them(
    read_at: dict[tuple[int, int], int], staleness: Staleness
) -> None:
    trainers, parts = (len(set(of)) for of in zip(*read_at, strict=True))
    each = ledger(trainers, parts=parts, version=5)
    for (trainer, part), version in read_at.items():
        each.enter(Ticket(trainer, 5, 5, part), "", version, 0.0)
    assert each.begin_update()
    assert each.end_update() == staleness


NUM_TRAINERS, NUM_PARTS, NUM_STEPS = 3, 2, 4


@dataclass
class Trainer:
    """Trains ``steps``; unless in sync mode, looks up ahead as ``hybrid.engine.step_feed`` does."""

    each: Ledger[str]
    mode: UpdateMode
    index: int
    steps: range
    made: list[list[str]]  # all updates
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    looked_up: list[Ticket] = field(default_factory=list)
    answered: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ahead = 1 if self.mode is SYNC else 2
        self.next_step = self.steps.start - self.ahead
        for _ in range(self.ahead):
            self.take_step()

    def actions(self) -> list[Callable[[], None]]:
        """What can happen next, in any order."""
        arrivals = [partial(self.arrive, *message) for message in self.in_flight]
        answers = [partial(self.answer, ticket) for ticket in self.looked_up if self.each.is_ready(ticket)]
        return [*arrivals, *answers, *[self.take_step] * (self.answered[self.next_step] == NUM_PARTS)]

    def take_step(self) -> None:
        """Send a step's gradients, each with a lookup ahead, but before the first step and after the last."""
        if self.next_step + self.ahead == self.steps.stop:
            self.each.finish(self.index, self.steps.stop)
        self.in_flight += [(self.next_step, part) for part in range(NUM_PARTS)]
        self.next_step += 1

    def arrive(self, step: int, part: int) -> None:
        self.in_flight.remove((step, part))
        if step in self.steps:
            give(self.each, self.index, step, part, followed=self.ahead == 2 and step + 1 in self.steps)
        if (later := step + self.ahead) in self.steps:
            version = max(self.steps.start, step + 1)
            self.looked_up.append(Ticket(self.index, later, version, part, Purpose.PREFETCH))

    def answer(self, ticket: Ticket) -> None:
        if self.mode is ASYNC:
            last = f"t{self.index}s{ticket.version - 1}p0"
            assert ticket.version == self.steps.start or any(last in update for update in self.made)
        else:
            assert (len(self.made), self.each.is_updating) == (ticket.version, False)
        self.looked_up.remove(ticket)
        self.each.serve(ticket)
        self.answered[ticket.step] += 1


def train(each: Ledger[str], trainers: list[Trainer], made: list[list[str]], chance: random.Random) -> None:
    """Do whatever can be done next, in any order, until nothing can."""
    under_way: list[str] = []

    def end_update() -> None:
        each.end_update()
        made.append(under_way)

    while True:
        actions = [action for trainer in trainers for action in trainer.actions()]
        if each.is_updating:
            actions.append(end_update)
        if (not actions or chance.random() < 0.5) and (taken := each.begin_update()):
            under_way = taken[1]
        elif actions:
            chance.choice(actions)()
        else:
            return


@pytest.mark.parametrize("mode", list(UpdateMode))
@settings(max_examples=50, deadline=None, derandomize=True)
@given(chance=st.randoms(use_true_random=True), is_even=st.booleans())
def test_whatever_order_messages_arrive_in_all_is_answered_and_applied_in_order(
    mode: UpdateMode, chance: random.Random, is_even: bool
) -> None:
    each, made, whole = ledger(NUM_TRAINERS, mode, NUM_PARTS), list[list[str]](), list[list[str]]()
    for _ in range(3):
        first = len(whole)
        counts = [NUM_STEPS if is_even else chance.randint(0, NUM_STEPS) for _ in range(NUM_TRAINERS)]
        steps = [range(first, first + count) for count in counts]
        train(each, [Trainer(each, mode, index, own, made) for index, own in enumerate(steps)], made, chance)
        for step in range(first, first + max(counts)):
            taking_part = [t for t, own in enumerate(steps) if step in own]
            whole.append([f"t{t}s{step}p{part}" for t in taking_part for part in range(NUM_PARTS)])
        for index in range(NUM_TRAINERS):
            each.rejoin(index, len(whole))
            assert is_ready(each, len(whole), index)
    assert mode is ASYNC or made == whole
    for start in (f"t{index}" for index in range(NUM_TRAINERS)):
        own, expected = ([c for update in of for c in update if c.startswith(start)] for of in (made, whole))
        assert own == expected
    assert each.is_idle
    assert not each._served
