"""The update barrier: what updates and lookups wait for, in which thread, and how failures end the wait."""

import itertools
import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future as Future_, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import pytest
from support.barriers import (
    NORM,
    PATIENCE_SECONDS,
    Applied,
    Barrier,
    Gate,
    Merged,
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
from hybrid.primitives.step_timings import OpenSpan, StepClock
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import Staleness, UpdateMode, UpdateRules


class TestLookups:
    def test_lookup_waits_for_its_version(self) -> None:
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

    def test_waiting_lookups_hold_no_thread(self) -> None:
        with barrier(1, ignore) as each:
            before = threading.active_count()
            futures = [when(each, 1, partial(int, i)) for i in range(500)]
            assert threading.active_count() == before
            assert not any(future.done() for future in futures)
            give(each, 0, 0)
            assert [answer(future) for future in futures] == list(range(500))

    def test_failing_lookup_does_not_affect_others(self) -> None:
        def fail() -> float:
            return 1 / 0

        with barrier(1, ignore) as each:
            at_once, later, fine = when(each, 0, fail), when(each, 1, fail), when(each, 1, lambda: "fine")
            give(each, 0, 0)
            assert answer(fine) == "fine"
            for future in (at_once, later):
                with pytest.raises(ZeroDivisionError):
                    answer(future)

    def test_update_waits_for_the_read_of_a_prefetch(self) -> None:
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

    def test_update_does_not_wait_for_other_lookups(self) -> None:
        with barrier(1, ignore, UpdateMode.PIPELINED) as each:
            answer(each.run_when_ready(Ticket(0, 1, 0, purpose=Purpose.PREDICT), nothing))
            give(each, 0, 0, followed=True)
            updated = when(each, 1, nothing)
            assert not is_done(updated)
            answer(ahead(each, 0, 1, nothing))
            answer(updated)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", list(UpdateMode))
def test_threads_of_trainers_train_in_order(mode: UpdateMode, seed: int) -> None:
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
    def test_last_part_runs_the_update_in_its_thread(self, mode: UpdateMode) -> None:
        threads = []
        with barrier(1, lambda _: threads.append(threading.get_ident()), mode, parts=2) as each:
            for step in range(3):
                for part in range(2):
                    assert each.version == step
                    give(each, 0, step, part=part, updates_here=True)
                assert each.version == step + 1
        assert threads == [threading.get_ident()] * 3

    def test_one_update_runs_at_a_time(self) -> None:
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

    def test_updater_applies_decided_steps(self) -> None:
        applied: Applied = []
        with barrier(1, applied.append, decided=True) as each:
            give(each, 0, 0, updates_here=True)  # returns, though nobody has decided
            answer(each.norm(0))
            assert applied == []
            each.decide(0, 1.0)
            answer(when(each, 1, nothing))
        assert applied == [["t0s0"]]

    def test_readers_answer_lookups_while_the_barrier_closes(self) -> None:
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
def test_drain_waits_for_the_running_update(mode: UpdateMode) -> None:
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
def test_take_staleness_covers_updates_since_the_last_call(updates_here: bool) -> None:
    with barrier(2, ignore) as each:
        for step, trainer in itertools.product(range(3), range(2)):
            read_at = max(0, step - 1)
            each.contribute(Ticket(trainer, step, step), "", read_at, updates_here=updates_here)
        each.drain()
        assert each.take_staleness() == Staleness(6, 4, 1)
        assert each.take_staleness() == Staleness()


def test_staleness_of_missing_updates_is_an_error() -> None:
    with (
        barrier(1, ignore, timeout_seconds=0.05) as each,
        pytest.raises(ClusterError, match=r"^step 2: updates before it are missing$"),
    ):
        each.take_staleness(2)


def test_updates_do_not_wait_for_finished_trainers() -> None:
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
    def test_restart_continues_from_a_version(self) -> None:
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

    def test_restart_forgets_finished_trainers_and_prefetches(self) -> None:
        with barrier(1, ignore, UpdateMode.PIPELINED) as each:
            answer(ahead(each, 0, 1, nothing))
            each.finish(0, 0)
            each.restart(0)
            give(each, 0, 0, followed=True)
            updated = when(each, 1, nothing)
            assert not is_done(updated)
            answer(ahead(each, 0, 1, nothing))
            answer(updated)

    def test_restart_may_go_back_to_decided_steps(self) -> None:
        with barrier(1, ignore, decided=True) as each:
            for start in (7, 5):
                each.restart(start)
                norm = each.norm(start)
                assert not norm.done()
                give(each, 0, start)
                assert answer(norm) == NORM
                each.decide(start, 1.0)
                each.drain()


def test_refused_gradients_change_nothing() -> None:
    applied: Applied = []
    with barrier(1, applied.append) as each:
        give(each, 0, 0)
        with pytest.raises(ClusterError, match=r"^trainer 0 sent gradients of step 0 twice$"):
            give(each, 0, 0)
        give(each, 0, 1)
        answer(when(each, 2, nothing))
    assert applied == [["t0s0"], ["t0s1"]]


def assert_told(
    waiting: Iterable[Future[Any]], each: Barrier, message: str, kind: type[Exception] = ClusterError
) -> None:
    """See that who waits, and everybody who comes later with whatever, is told of a failure."""
    calls: list[Callable[[], object]] = [
        *(partial(answer, future) for future in waiting),
        lambda: answer(when(each, 0, nothing)),
        lambda: give(each, 0, 1),
        lambda: answer(each.norm(1)),
        each.drain,
    ]
    for call in calls:
        with pytest.raises(kind, match=message):
            call()


class TestDecided:
    """Steps that wait for what the trainers make of their norm."""

    def test_norm_is_known_once_all_gradients_arrived(self) -> None:
        applied: Applied = []
        with barrier(2, applied.append, decided=True) as each:
            give(each, 1, 0)
            early, next_one = each.norm(0), each.norm(1)
            assert not is_done(early)
            give(each, 0, 0)
            assert answer(early) == NORM
            assert each.norm(0).done()  # for whoever asks late
            assert answer(each.norm(0)) == NORM
            assert applied == []
            each.decide(0, 0.5)
            answer(when(each, 1, nothing))
            assert applied == [["0.5*t0s0", "0.5*t1s0"]]
            assert answer(each.norm(0)) == NORM  # even after the update
            assert not next_one.done()
            for trainer in range(2):
                give(each, trainer, 1)
            assert answer(next_one) == NORM
            each.decide(1, 1.0)
            each.drain()
        assert applied[1] == ["t0s1", "t1s1"]

    def test_a_dropped_step_counts_as_an_update(self) -> None:
        applied: Applied = []
        with barrier(1, applied.append, decided=True) as each:
            give(each, 0, 0)
            each.decide(0, None)
            assert answer(when(each, 1, lambda: list(applied))) == []
            give(each, 0, 1)
            each.decide(1, 1.0)
            assert answer(when(each, 2, lambda: list(applied))) == [["t0s1"]]

    def test_an_undecided_step_is_an_error(self) -> None:
        message = r"^step 0: no decision of trainer 0 \(cluster.timeout_seconds\)$"
        with barrier(1, ignore, decided=True, timeout_seconds=0.05) as each:
            waiting = when(each, 1, nothing)
            give(each, 0, 0)
            assert_told([waiting], each, message)
            assert each.version == 0

    def test_close_ends_the_wait_for_a_decision(self) -> None:
        with barrier(1, ignore, decided=True) as each, ThreadPoolExecutor(1) as pool:
            norm = each.norm(0)
            give(each, 0, 0)
            answer(norm)
            pool.submit(each.close).result(PATIENCE_SECONDS)


class TestFailure:
    def test_missing_trainers_are_named(self) -> None:
        with barrier(3, ignore, timeout_seconds=0.05) as each:
            waiting = when(each, 1, nothing)
            give(each, 1, 0)
            missing = "trainer 0, trainer 2"
            message = rf"^step 0: no gradients from {missing} for 0.05 s \(cluster.timeout_seconds\)$"
            assert_told([waiting], each, message)

    @pytest.mark.parametrize("updates_here", [False, True])
    def test_a_failing_update_reaches_waiting_and_later_callers(self, updates_here: bool) -> None:
        def explode(_: list[str]) -> None:
            raise ArithmeticError("bad row")

        with barrier(1, explode) as each:
            waiting = [when(each, 1, nothing), when(each, 5, nothing)]
            norms = [each.norm(0), each.norm(1)]
            give(each, 0, 0, updates_here=updates_here)
            assert_told([*waiting, *norms], each, r"^bad row$", ArithmeticError)
            assert each.version == 0

    def test_remote_failure_reaches_waiting_and_later_callers(self) -> None:
        with barrier(2, ignore, decided=True) as each, ThreadPoolExecutor(1) as pool:
            give(each, 0, 0)
            waiting = when(each, 1, nothing), each.norm(0)
            draining = pool.submit(each.drain)
            assert not wait([draining], timeout=0.02).done
            each.fail("trainer 1 is gone")
            assert_told(waiting, each, r"^trainer 1 is gone$")
            with pytest.raises(ClusterError, match=r"^trainer 1 is gone$"):
                draining.result(PATIENCE_SECONDS)

    def test_remote_failure_ends_the_wait_for_a_decision(self) -> None:
        with barrier(1, ignore, decided=True) as each:
            waiting, norm = when(each, 1, nothing), each.norm(0)
            give(each, 0, 0)
            answer(norm)
            each.fail("trainer 0 is gone")
            with pytest.raises(ClusterError, match=r"^trainer 0 is gone$"):
                answer(waiting)

    def test_first_failure_is_reported(self) -> None:
        with barrier(1, ignore) as each:
            each.fail("the cause")
            each.fail("what followed from it")
            with pytest.raises(ClusterError, match=r"^the cause$"):
                each.drain()


class TestClose:
    def test_close_fails_waiting_callers_and_is_idempotent(self) -> None:
        with barrier(2, ignore) as each:
            waiting = when(each, 1, nothing), each.norm(0)
            give(each, 0, 0)
            each.close()
            assert_told(waiting, each, "the worker is stopping")

    def test_close_answers_lookups_of_the_running_update(self) -> None:
        gate = Gate()
        with barrier(1, gate) as each, ThreadPoolExecutor(1) as pool:
            futures = [when(each, 1, partial(int, i)) for i in range(200)]
            too_late = when(each, 2, nothing)
            give(each, 0, 0)
            gate.await_entry()
            closing = pool.submit(each.close)
            gate.let_through()
            closing.result(PATIENCE_SECONDS)
            assert [answer(future) for future in futures] == list(range(200))
            with pytest.raises(ClusterError, match="the worker is stopping"):
                answer(too_late)

    def test_close_answers_lookups_released_by_another_thread(self) -> None:
        """Though that thread is slow to release them, and no update is under way any more."""

        class SlowSpan(OpenSpan):
            def close(self) -> None:
                closing.append(pool.submit(each.close))
                wait(closing, timeout=0.2)

        class SlowClock(StepClock):
            def begin(self, *_: object, **__: object) -> OpenSpan:
                return SlowSpan([], "wait", 1, None, None, 0)

        closing: list[Future_[None]] = []
        rules = UpdateRules(1, UpdateMode.SYNC, timeout_seconds=PATIENCE_SECONDS)
        each = Barrier(rules, lambda step, contributions: Merged(contributions, ignore), SlowClock())
        with ThreadPoolExecutor(1) as pool:
            waiting = when(each, 1, lambda: "answered")
            give(each, 0, 0, updates_here=True)
            assert answer(waiting) == "answered"
            closing[0].result(PATIENCE_SECONDS)
