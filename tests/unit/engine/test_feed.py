"""The feed of steps: when lookups start, what they ask for, and what is told of a trainer that ends."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from hybrid import transport
from hybrid.batch import Batch, SparseFeatures
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.trainer.lookup import ConcatenatedFeatures, Lookup, Outbox
from hybrid.engine.step_feed import Feed, StepInput
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateMode
from hybrid.server.barrier import UpdateBarrier

TRAINER = 3
ANY_MODE = pytest.mark.parametrize("mode", list(UpdateMode))
AHEAD = pytest.mark.parametrize("mode", [UpdateMode.PIPELINED, UpdateMode.ASYNC])


def batch(number: int, size: int = 2, *, ended: bool = False) -> Batch:
    """A batch that is known by its labels."""
    sparse = SparseFeatures(torch.zeros(size, dtype=torch.int64), None, None, 1)
    return Batch(torch.zeros(size, 1), sparse, torch.full((size,), float(number)), size, ended)


END = Batch.empty(1, 1)._replace(ended=True)


class Word(transport.Pending[None]):
    """Something told to a worker, which has heard it once somebody has waited for that."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._is_heard = False

    def done(self, wait_seconds: float = 0.0) -> bool:
        return True

    def wait(self) -> None:
        if not self._is_heard:
            self._events.append("heard")
        self._is_heard = True


def nothing(width: int = 0) -> Lookup:
    return Lookup(
        Ticket(0, 0, 0), {}, ConcatenatedFeatures((), width), {}, Outbox(), StepClock(), is_empty=True
    )


class Log:
    """Embeddings, a worker and a source of batches that write down what happens, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tickets: list[Ticket] = []
        self.lookups: dict[tuple[int, int], Lookup] = {}

    def lookup(self, sparse: SparseFeatures, ticket: Ticket, after: Lookup | None = None) -> Lookup:
        self.tickets.append(ticket)
        lookup = nothing(ticket.step)  # as wide as the step's number
        self.lookups[ticket.step, ticket.part] = lookup
        self.events.append(f"look up {ticket.step}{self._with(after)}")
        return lookup

    def _with(self, after: Lookup | None) -> str:
        return next((f" with {step}" for (step, _), each in self.lookups.items() if each is after), "")

    def flush(self) -> None:
        self.events.append("all sent has arrived")

    def empty_lookup(self, ticket: Ticket, after: Lookup | None = None) -> Lookup:
        self.events.append(f"look up nothing{self._with(after)}")
        return nothing()

    def call_barrier(self, method: Callable[..., None], trainer: int, step: int) -> transport.Pending[None]:
        assert trainer == TRAINER
        says = {UpdateBarrier.finish: "ends at", UpdateBarrier.rejoin: "is back at"}
        self.events.append(f"{says[method]} {step}")
        return Word(self.events)

    def reading(self, *batches: Batch) -> Iterator[Batch]:
        for each in batches:
            self.events.append("read")
            yield each

    def feed(self, mode: UpdateMode, parts: int = 1) -> Feed[Batch]:
        return Feed(
            cast(Embeddings, self),
            [cast(transport.RemoteHosted[Any], self)],
            TRAINER,
            mode,
            parts,
            StepClock(),
        )

    def compute(self, steps: Iterator[StepInput[Batch]]) -> StepInput[Batch]:
        """One step as train_step takes it: each micro-batch starts its lookup, or has had it started."""
        current = next(steps)
        for micro in current.micro_batches:
            micro.start()
            self.events.append(f"compute {micro.ticket.step}")
        return current

    def take(self) -> list[str]:
        taken, self.events = self.events, []
        return taken


@pytest.fixture
def log() -> Log:
    return Log()


class TestOrder:
    def test_a_step_is_looked_up_when_its_time_comes(self, log: Log) -> None:
        feed = log.feed(UpdateMode.SYNC)
        feed.begin(log.reading(batch(0), batch(1)), 5)
        log.compute(feed)
        assert log.take() == ["read", "look up 5", "compute 5"]
        log.compute(feed)
        assert log.take() == ["read", "look up 6", "compute 6"]

    @AHEAD
    def test_ahead_the_step_after_the_next_is_looked_up_with_the_gradients_of_this_one(
        self, log: Log, mode: UpdateMode
    ) -> None:
        feed = log.feed(mode)
        feed.begin(log.reading(*map(batch, range(4))), 5)
        log.compute(feed)
        first_two = ["read", "look up 5", "read", "look up 6"]
        assert log.take() == [*first_two, "read", "look up 7 with 5", "compute 5"]
        log.compute(feed)
        assert log.take() == ["read", "look up 8 with 6", "compute 6"]
        log.compute(feed)
        assert log.take() == ["compute 7"]
        log.compute(feed)
        assert log.take() == ["compute 8"]

    @AHEAD
    def test_the_parts_of_a_step_go_with_those_of_the_earlier_one(self, log: Log, mode: UpdateMode) -> None:
        feed = log.feed(mode, parts=2)
        feed.begin(log.reading(*map(batch, range(3))), 0)
        log.compute(feed)
        earlier = log.lookups
        assert list(earlier) == [(step, part) for step in range(3) for part in range(2)]
        assert log.events.count("look up 2 with 0") == 2

    @ANY_MODE
    def test_each_step_gets_the_batch_and_the_vectors_of_its_own(self, log: Log, mode: UpdateMode) -> None:
        feed = log.feed(mode)
        feed.begin(log.reading(*map(batch, range(4))), 5)
        for step, current in enumerate(feed, 5):
            (micro,) = current.micro_batches
            assert micro.batch.labels.tolist() == current.batch.labels.tolist() == [step - 5.0] * 2
            assert micro.start().wait().shape == (0, step)

    @ANY_MODE
    def test_a_stream_may_end_and_another_begin(self, log: Log, mode: UpdateMode) -> None:
        feed = log.feed(mode)
        assert list(feed) == []
        for first in (0, 2):
            feed.begin(log.reading(batch(0), batch(1)), first)
            log.take()
            steps = [log.compute(feed).micro_batches[0].ticket.step for _ in range(2)]
            assert steps == [first, first + 1]
            with pytest.raises(StopIteration):
                next(feed)

    def test_beginning_anew_drops_what_was_looked_up_ahead(self, log: Log) -> None:
        feed = log.feed(UpdateMode.PIPELINED)
        feed.begin(log.reading(*map(batch, range(9))), 0)
        log.compute(feed)
        feed.begin(log.reading(batch(40), batch(41)), 20)
        assert log.compute(feed).batch.labels.tolist() == [40.0] * 2
        assert log.tickets[-2:] == [prefetched(20, 20), prefetched(21, 20)]
        assert log.take()[-2:] == ["look up 21", "compute 20"]


def prefetched(step: int, version: int, part: int = 0) -> Ticket:
    return Ticket(TRAINER, step, version, part, Purpose.PREFETCH)


class TestTickets:
    def test_a_step_sees_all_updates_before_it(self, log: Log) -> None:
        feed = log.feed(UpdateMode.SYNC, parts=2)
        feed.begin(log.reading(batch(0), batch(1)), 5)
        for _ in range(2):
            log.compute(feed)
        assert log.tickets == [Ticket(TRAINER, step, step, part) for step in (5, 6) for part in (0, 1)]

    @AHEAD
    def test_ahead_a_step_lacks_the_last_update(self, log: Log, mode: UpdateMode) -> None:
        feed = log.feed(mode, parts=2)
        feed.begin(log.reading(*map(batch, range(4))), 5)
        for _ in range(4):
            log.compute(feed)
        expected = [(5, 5), (6, 5), (7, 6), (8, 7)]
        assert log.tickets == [prefetched(*each, part) for each in expected for part in (0, 1)]

    @AHEAD
    @pytest.mark.parametrize("num_steps", [1, 2, 3])
    def test_all_steps_but_the_last_are_followed(self, log: Log, mode: UpdateMode, num_steps: int) -> None:
        feed = log.feed(mode, parts=2)
        feed.begin(log.reading(*map(batch, range(num_steps))), 0)
        for step in range(num_steps):
            log.compute(feed)
            is_followed = [log.lookups[step, part].is_followed for part in range(2)]
            assert is_followed == [step < num_steps - 1] * 2

    @AHEAD
    def test_the_rest_of_a_stream_asks_for_what_its_steps_would_have_been_looked_up_with(
        self, log: Log, mode: UpdateMode
    ) -> None:
        """Pipelined. In the other mode there is no such thing."""
        feed = log.feed(mode)
        feed.begin(log.reading(*map(batch, range(3))), 5, is_within=True)
        log.compute(feed)
        first = {UpdateMode.PIPELINED: 4, UpdateMode.ASYNC: 5}[mode]
        assert log.tickets == [prefetched(5, first), prefetched(6, 5), prefetched(7, 6)]

    @AHEAD
    @pytest.mark.parametrize("num_steps", [1, 2, 3])
    def test_the_last_step_that_is_taken_is_a_closing_one(
        self, log: Log, mode: UpdateMode, num_steps: int
    ) -> None:
        """Pipelined; twice, and then of steps that nobody has counted."""
        feed = log.feed(mode, parts=2)
        feed.begin(log.reading(*map(batch, range(10))), 5)
        for first in (5, 5 + num_steps):
            taken = [current.micro_batches[0].ticket.step for current in feed.take(num_steps)]
            assert taken == list(range(first, first + num_steps))
        list(feed)
        closing = {key for key, lookup in log.lookups.items() if lookup.is_closing}
        last = (4 + num_steps, 4 + 2 * num_steps) if mode is UpdateMode.PIPELINED else ()
        assert closing == {(step, part) for step in last for part in range(2)}

    @ANY_MODE
    def test_the_dense_side_sees_all_updates_before_its_step(self, log: Log, mode: UpdateMode) -> None:
        """A remote dense net is never ahead, whatever the tables are."""
        feed = log.feed(mode, parts=2)
        feed.begin(log.reading(*map(batch, range(3))), 5)
        tickets = [micro.ticket for current in feed for micro in current.micro_batches]
        assert tickets == [Ticket(TRAINER, step, step, part) for step in (5, 6, 7) for part in (0, 1)]

    def test_micro_batches_are_the_parts_of_the_batch(self, log: Log) -> None:
        feed = log.feed(UpdateMode.SYNC, parts=3)
        feed.begin(log.reading(batch(0, size=5)), 0)
        assert [len(micro.batch.labels) for micro in log.compute(feed).micro_batches] == [2, 2, 1]


@AHEAD
def test_settling_waits_for_the_lookups_that_left_with_gradients(
    monkeypatch: pytest.MonkeyPatch, log: Log, mode: UpdateMode
) -> None:
    settled: list[Lookup] = []
    monkeypatch.setattr(Lookup, "flush", lambda lookup: settled.append(lookup))
    feed = log.feed(mode, parts=2)
    feed.begin(log.reading(*map(batch, range(4))), 0)
    log.compute(feed)
    log.take()
    feed.flush()
    assert settled == [log.lookups[step, part] for step in (1, 2) for part in (0, 1)]
    assert log.take() == ["all sent has arrived"]


class TestEnds:
    """A trainer that has run out of samples while others go on."""

    def test_it_is_announced_once_and_looks_nothing_up(self, log: Log) -> None:
        feed = log.feed(UpdateMode.SYNC)
        feed.begin(log.reading(batch(0), END, END), 5)
        for _ in range(3):
            log.compute(feed)
        nothing = ["read", "look up nothing"]
        assert log.take() == [
            *["read", "look up 5", "compute 5"],
            *["read", "ends at 6", "heard", "look up nothing", "compute 6"],
            *[*nothing, "compute 7"],
        ]

    @AHEAD
    def test_ahead_it_is_announced_before_its_last_steps_are_computed(
        self, log: Log, mode: UpdateMode
    ) -> None:
        feed = log.feed(mode)
        feed.begin(log.reading(batch(0), batch(1), END, END), 5)
        log.compute(feed)
        assert log.take()[-5:] == ["read", "ends at 7", "heard", "look up nothing with 5", "compute 5"]
        for _ in range(3):
            log.compute(feed)
        assert log.take() == ["read", "look up nothing with 6", "compute 6", "compute 7", "compute 8"]
        assert log.tickets == [prefetched(5, 5), prefetched(6, 5)]
        assert [lookup.is_followed for lookup in log.lookups.values()] == [True, False]

    @ANY_MODE
    def test_a_trainer_without_any_sample_ends_at_once(self, log: Log, mode: UpdateMode) -> None:
        feed = log.feed(mode, parts=2)
        feed.begin(log.reading(END, END), 5)
        for _ in range(2):
            assert len(log.compute(feed).micro_batches) == 2
        assert log.events.count("ends at 5") == 1
        assert log.tickets == []

    @ANY_MODE
    def test_it_rejoins_from_the_next_step_on(self, log: Log, mode: UpdateMode) -> None:
        feed = log.feed(mode)
        feed.begin(log.reading(batch(0), END), 0)
        for _ in range(2):
            log.compute(feed)
        log.take()
        feed.rejoin()
        feed.rejoin()
        assert log.take() == ["is back at 2", "heard"]
        feed.begin(log.reading(END), 2)
        log.compute(feed)
        assert "ends at 2" in log.take()

    def test_a_trainer_that_never_ended_is_not_announced(self, log: Log) -> None:
        feed = log.feed(UpdateMode.SYNC)
        feed.begin(log.reading(batch(0)), 0)
        log.compute(feed)
        feed.rejoin()
        feed.begin(log.reading(batch(0)), 1)
        log.compute(feed)
        assert log.take() == ["read", "look up 0", "compute 0", "read", "look up 1", "compute 1"]


def test_the_time_for_data_and_lookups_is_counted(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    clock, phases = StepClock(), []
    phase = clock.phase

    def noted(name: str) -> Any:
        phases.append(name)
        return phase(name)

    monkeypatch.setattr(clock, "phase", noted)
    feed = Feed[Batch](
        cast(Embeddings, log),
        [cast(transport.RemoteHosted[Any], log)],
        TRAINER,
        UpdateMode.PIPELINED,
        1,
        clock,
    )
    feed.begin(log.reading(batch(0), batch(1)), 0)
    log.compute(feed)
    assert phases == ["data", "lookup", "data", "lookup", "data"]
