"""The update barrier: who waits for what, and in which thread. No test sleeps; events meet."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import pytest
from support.barriers import (
    NORM,
    PATIENCE_SECONDS,
    Applied,
    Gate,
    ahead,
    answer,
    barrier,
    give,
    ignore,
    is_done,
    nothing,
    when,
)
from torch.futures import Future

from hybrid.errors import ClusterError
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import Staleness, UpdateMode


class TestLookups:
    def test_each_waits_for_the_version_that_it_asked_for(self) -> None:
        gate = Gate()
        with barrier(1, gate) as each:
            assert when(each, 0, lambda: "at once").done()
            first, second = when(each, 1, lambda: len(gate.applied)), when(each, 2, lambda: len(gate.applied))
            give(each, 0, 0)
            gate.await_entry()
            assert not first.done()  # the update is under way
            gate.let_through()
            assert answer(first) == 1
            assert not second.done()
            give(each, 0, 1)
            gate.let_through()
            assert answer(second) == 2

    def test_while_they_wait_they_hold_no_thread(self) -> None:
        with barrier(1, ignore) as each:
            before = threading.active_count()
            futures = [when(each, 1, partial(int, i)) for i in range(500)]
            assert threading.active_count() == before
            assert not any(future.done() for future in futures)
            give(each, 0, 0)
            assert [answer(future) for future in futures] == list(range(500))

    def test_one_that_fails_fails_alone(self) -> None:
        def fail() -> float:
            return 1 / 0

        with barrier(1, ignore) as each:
            at_once, later, fine = when(each, 0, fail), when(each, 1, fail), when(each, 1, lambda: "fine")
            give(each, 0, 0)
            assert answer(fine) == "fine"
            for future in (at_once, later):
                with pytest.raises(ZeroDivisionError):
                    answer(future)

    def test_an_update_waits_until_one_ahead_has_read_its_rows(self) -> None:
        """Not only until it arrived: rows must not change under its hands."""
        gate, reading, may_end = Gate(), threading.Event(), threading.Event()

        def read() -> int:
            reading.set()
            assert may_end.wait(PATIENCE_SECONDS)
            return len(gate.applied)

        with barrier(1, gate, UpdateMode.PIPELINED) as each, ThreadPoolExecutor(1) as pool:
            looking_up = pool.submit(ahead, each, 0, 1, read)
            assert reading.wait(PATIENCE_SECONDS)
            give(each, 0, 0, followed=True)
            assert not gate.entered.acquire(timeout=0.02)
            may_end.set()
            gate.await_entry()
            assert answer(looking_up.result()) == 0
            gate.let_through()

    def test_an_update_waits_for_none_of_another_purpose(self) -> None:
        with barrier(1, ignore, UpdateMode.PIPELINED) as each:
            answer(each.run_when_ready(Ticket(0, 1, 0, purpose=Purpose.PREDICT), nothing))
            give(each, 0, 0, followed=True)
            updated = when(each, 1, nothing)
            assert not is_done(updated)
            answer(ahead(each, 0, 1, nothing))
            answer(updated)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", list(UpdateMode))
def test_trainers_in_threads_train_in_step_and_in_order(mode: UpdateMode, seed: int) -> None:
    """Each step's gradients, and the lookups of the next step or the one after, arrive in any order."""
    num_trainers, num_steps, parts = 4, 30, 2
    distance = 1 if mode is UpdateMode.SYNC else 2
    applied: Applied = []
    with (
        barrier(num_trainers, applied.append, mode, parts=parts) as each,
        ThreadPoolExecutor(num_trainers) as pool,
    ):

        def train(trainer: int) -> list[int]:
            chance = random.Random(100 * seed + trainer)
            lookups: list[list[Future[int]]] = [[] for _ in range(num_steps)]

            def own_updates() -> int:
                own = [text for of in list(applied) for text in of if text.startswith(f"t{trainer}")]
                return len(own) // parts

            def look_up(step: int, part: int) -> None:
                if step < num_steps:
                    ticket = Ticket(trainer, step, max(0, step + 1 - distance), part, Purpose.PREFETCH)
                    lookups[step].append(each.run_when_ready(ticket, own_updates))

            def send(step: int, part: int) -> None:
                text, is_followed = f"t{trainer}s{step}p{part}", distance == 2 and step + 1 < num_steps
                updates_here = chance.random() < 0.5
                give(each, trainer, step, text, part=part, followed=is_followed, updates_here=updates_here)

            for step, part in itertools.product(range(distance), range(parts)):
                look_up(step, part)
            seen = []
            for step in range(num_steps):
                seen += [answer(lookup) for lookup in lookups[step]]
                events = [*itertools.product([send], [step], range(parts))]
                events += itertools.product([look_up], [step + distance], range(parts))
                for do, of_step, part in chance.sample(events, len(events)):
                    do(of_step, part)
            return seen

        fewest = [max(0, step + 1 - distance) for step in range(num_steps) for _ in range(parts)]
        for seen in pool.map(train, range(num_trainers)):
            assert all(map(int.__ge__, seen, fewest))
            assert mode is UpdateMode.ASYNC or seen == fewest
        each.drain()
    trainers_parts = list(itertools.product(range(num_trainers), range(parts)))
    whole = [[f"t{t}s{step}p{part}" for t, part in trainers_parts] for step in range(num_steps)]
    assert mode is UpdateMode.ASYNC or applied == whole
    assert sorted(itertools.chain(*applied)) == sorted(itertools.chain(*whole))


class TestUpdatesHere:
    """Where whoever completes an update makes it."""

    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_the_last_part_is_followed_by_the_update_in_the_same_thread(self, mode: UpdateMode) -> None:
        threads = []
        with barrier(1, lambda _: threads.append(threading.get_ident()), mode, parts=2) as each:
            for step in range(3):
                for part in range(2):
                    assert each.version == step
                    give(each, 0, step, part=part, updates_here=True)
                assert each.version == step + 1
        assert threads == [threading.get_ident()] * 3

    def test_nobody_makes_one_while_another_is_under_way(self) -> None:
        gate = Gate()
        with barrier(2, gate, UpdateMode.ASYNC) as each:
            give(each, 0, 0)
            gate.await_entry()
            for step in range(2):
                give(each, 1, step, updates_here=True)  # returns, though the gate is closed
            gate.let_through()
            gate.await_entry()
            gate.let_through()
            each.drain()
        assert gate.applied == [["t0s0"], ["t1s0", "t1s1"]]

    def test_what_waits_for_a_decision_is_left_to_the_updater(self) -> None:
        applied: Applied = []
        with barrier(1, applied.append, decided=True) as each:
            give(each, 0, 0, updates_here=True)  # returns, though nobody has decided
            answer(each.norm(0))
            assert applied == []
            each.decide(0, 1.0)
            answer(when(each, 1, nothing))
        assert applied == [["t0s0"]]

    def test_its_lookups_are_answered_by_another_thread_though_the_barrier_closes(self) -> None:
        gate = Gate()
        with barrier(1, gate) as each, ThreadPoolExecutor(2) as pool:
            waiting = when(each, 1, lambda: (len(gate.applied), threading.current_thread().name))
            updating = pool.submit(give, each, 0, 0, updates_here=True)
            gate.await_entry()
            closing = pool.submit(each.close)
            assert not is_done(waiting)
            gate.let_through()
            number, name = answer(waiting)
            assert number == 1
            assert name.startswith("lookup")
            for ended in (updating, closing):
                ended.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_drain_returns_after_the_update_under_way(mode: UpdateMode) -> None:
    gate = Gate()
    with barrier(1, gate, mode) as each, ThreadPoolExecutor(1) as pool:
        each.drain()  # nothing is under way
        give(each, 0, 0)
        gate.await_entry()
        drained = pool.submit(each.drain)
        assert not wait([drained], timeout=0.02).done
        gate.let_through()
        drained.result(PATIENCE_SECONDS)
        assert gate.applied == [["t0s0"]]


@pytest.mark.parametrize("updates_here", [False, True])
def test_staleness_is_of_all_updates_since_it_was_taken(updates_here: bool) -> None:
    with barrier(2, ignore) as each:
        for step, trainer in itertools.product(range(3), range(2)):
            read_at = max(0, step - 1)
            each.contribute(Ticket(trainer, step, step), "", read_at, updates_here=updates_here)
        each.drain()
        assert each.take_staleness() == Staleness(6, 4, 1)
        assert each.take_staleness() == Staleness()


def test_staleness_is_awaited_of_as_many_updates_as_are_asked_for() -> None:
    gate = Gate()
    with barrier(1, gate) as each, ThreadPoolExecutor(1) as pool:
        give(each, 0, 0)
        gate.await_entry()
        assert each.take_staleness() == Staleness()
        taken = pool.submit(each.take_staleness, 1)
        assert not wait([taken], timeout=0.02).done
        gate.let_through()
        assert taken.result(PATIENCE_SECONDS) == Staleness(1, 0, 0)


def test_staleness_of_updates_that_do_not_come_is_an_error() -> None:
    with (
        barrier(1, ignore, timeout_seconds=0.05) as each,
        pytest.raises(ClusterError, match=r"^step 2: updates before it are missing$"),
    ):
        each.take_staleness(2)


def test_who_has_finished_is_not_waited_for_until_it_is_back() -> None:
    applied: Applied = []
    with barrier(2, applied.append) as each:
        give(each, 0, 0)
        updated = when(each, 1, nothing)
        assert not is_done(updated)
        each.finish(1, 0)
        answer(updated)
        each.rejoin(1, 1)
        give(each, 0, 1)
        updated = when(each, 2, nothing)
        assert not is_done(updated)
        give(each, 1, 1)
        answer(updated)
    assert applied == [["t0s0"], ["t0s1", "t1s1"]]


class TestRestart:
    def test_it_counts_on_from_a_checkpoint(self) -> None:
        applied: Applied = []
        with barrier(1, applied.append) as each:
            each.restart(293)
            assert each.version == 293
            assert when(each, 293, lambda: "at once").done()
            later = when(each, 294, lambda: len(applied))
            with pytest.raises(AssertionError):
                each.restart(294)  # somebody waits for it
            give(each, 0, 293)
            assert answer(later) == 1

    def test_it_forgets_ends_and_what_was_looked_up_ahead(self) -> None:
        with barrier(1, ignore, UpdateMode.PIPELINED) as each:
            answer(ahead(each, 0, 1, nothing))
            each.finish(0, 0)
            each.restart(0)
            give(each, 0, 0, followed=True)
            updated = when(each, 1, nothing)
            assert not is_done(updated)
            answer(ahead(each, 0, 1, nothing))
            answer(updated)

    def test_it_may_go_back_to_steps_that_were_decided(self) -> None:
        with barrier(1, ignore, decided=True) as each:
            for start in (7, 5):
                each.restart(start)
                norm = each.norm(start)
                assert not norm.done()
                give(each, 0, start)
                assert answer(norm) == NORM
                each.decide(start, 1.0)
                each.drain()


def test_gradients_that_are_refused_leave_nothing() -> None:
    applied: Applied = []
    with barrier(1, applied.append) as each:
        give(each, 0, 0)
        with pytest.raises(ClusterError, match=r"^trainer 0 sent gradients of step 0 twice$"):
            give(each, 0, 0)
        give(each, 0, 1)
        answer(when(each, 2, nothing))
    assert applied == [["t0s0"], ["t0s1"]]
