"""The update barrier where it does not simply go on: decided steps, ends, failures, close."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from support.barriers import (
    NORM,
    PATIENCE_SECONDS,
    Applied,
    Barrier,
    Gate,
    answer,
    barrier,
    give,
    ignore,
    is_done,
    nothing,
    when,
)

from hybrid.errors import ClusterError
from hybrid.steps.rules import UpdateMode


class TestDecided:
    """Steps that wait for what the trainers make of their norm."""

    def test_the_norm_is_answered_once_all_gradients_are_in(self) -> None:
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
        message = r"^step 0: no decision of trainer 0 \(cluster.step_timeout_seconds\)$"
        with barrier(1, ignore, decided=True, timeout_seconds=0.05) as each:
            waiting = when(each, 1, nothing)
            give(each, 0, 0)
            for call in (lambda: answer(waiting), *later_calls(each)):
                with pytest.raises(ClusterError, match=message):
                    call()
            assert each.version == 0

    def test_close_ends_the_wait_for_a_decision(self) -> None:
        with barrier(1, ignore, decided=True) as each, ThreadPoolExecutor(1) as pool:
            norm = each.norm(0)
            give(each, 0, 0)
            answer(norm)
            pool.submit(each.close).result(PATIENCE_SECONDS)


class TestEnds:
    """Trainers that take no part from some step on."""

    @pytest.mark.parametrize("is_told_first", [False, True])
    def test_the_others_do_not_wait_for_a_trainer_that_has_ended(self, is_told_first: bool) -> None:
        applied: Applied = []
        with barrier(3, applied.append) as each:
            if is_told_first:
                each.finish(1, 1)
            for trainer in (2, 1, 0):
                give(each, trainer, 0)  # the step before its end has all
            answer(when(each, 1, nothing))
            give(each, 2, 1)
            give(each, 0, 1)
            updated = when(each, 2, nothing)
            if not is_told_first:
                assert not is_done(updated)
                each.finish(1, 1)
            answer(updated)
        assert applied == [["t0s0", "t1s0", "t2s0"], ["t0s1", "t2s1"]]

    def test_its_last_step_still_waits_for_it(self) -> None:
        with barrier(2, ignore) as each:
            each.finish(1, 1)
            give(each, 0, 0)
            updated = when(each, 1, nothing)
            assert not is_done(updated)
            give(each, 1, 0)
            answer(updated)

    def test_gradients_after_the_end_are_an_error(self) -> None:
        with barrier(2, ignore) as each:
            each.finish(1, 2)
            give(each, 1, 1)
            with pytest.raises(ClusterError, match=r"^trainer 1 sent gradients of step 2 after its end$"):
                give(each, 1, 2)

    @pytest.mark.parametrize("is_told_first", [False, True])
    def test_a_trainer_may_rejoin_while_earlier_steps_are_under_way(self, is_told_first: bool) -> None:
        applied: Applied = []
        with barrier(2, applied.append) as each:
            each.finish(1, 0)
            if is_told_first:
                each.rejoin(1, 1)
            give(each, 0, 0)
            answer(when(each, 1, nothing))
            if not is_told_first:
                each.rejoin(1, 1)
            give(each, 0, 1)
            updated = when(each, 2, nothing)
            assert not is_done(updated)
            give(each, 1, 1)
            answer(updated)
        assert applied == [["t0s0"], ["t0s1", "t1s1"]]

    def test_a_trainer_may_end_and_rejoin_again_and_again(self) -> None:
        applied: Applied = []
        with barrier(2, applied.append) as each:
            for end, again in ((0, 1), (2, 4)):
                each.finish(1, end)
                each.rejoin(1, again)
            for step in range(5):
                give(each, 0, step)
                updated = when(each, step + 1, nothing)
                if step in (1, 4):
                    assert not is_done(updated)
                    give(each, 1, step)
                answer(updated)
        assert [len(contributions) for contributions in applied] == [1, 2, 1, 1, 2]

    def test_a_trainer_that_ended_before_a_restart_may_rejoin(self) -> None:
        with barrier(2, ignore) as each:
            each.finish(1, 1)
            each.restart(4)
            each.rejoin(1, 4)
            give(each, 0, 4)
            updated = when(each, 5, nothing)
            assert not is_done(updated)
            give(each, 1, 4)
            answer(updated)

    def test_where_all_have_ended_nothing_is_updated(self) -> None:
        with barrier(2, ignore) as each:
            for trainer in range(2):
                each.finish(trainer, 0)
            assert not is_done(when(each, 1, nothing))
            each.drain()
            assert each.version == 0

    def test_a_step_of_trainers_that_have_ended_names_only_the_others(self) -> None:
        with barrier(3, ignore, timeout_seconds=0.05) as each:
            each.finish(2, 0)
            give(each, 0, 0)
            with pytest.raises(ClusterError, match=r"^step 0: no gradients from trainer 1 for 0.05 s"):
                each.drain()


def later_calls(each: Barrier) -> list[Callable[[], object]]:
    """Everything that may be asked of a barrier, as of one that has failed."""
    return [
        lambda: answer(when(each, 0, nothing)),
        lambda: give(each, 0, 1),
        lambda: answer(each.norm(1)),
        each.drain,
    ]


class TestFailure:
    @pytest.mark.parametrize("mode", [UpdateMode.SYNC, UpdateMode.PIPELINED])
    def test_a_trainer_that_does_not_come_is_named(self, mode: UpdateMode) -> None:
        with barrier(3, ignore, mode, timeout_seconds=0.05) as each:
            waiting = when(each, 1, nothing)
            give(each, 1, 0)
            missing = "trainer 0, trainer 2"
            message = rf"^step 0: no gradients from {missing} for 0.05 s \(cluster.step_timeout_seconds\)$"
            for call in (lambda: answer(waiting), *later_calls(each)):
                with pytest.raises(ClusterError, match=message):
                    call()

    def test_draining_a_step_that_lacks_a_trainer_fails_when_the_step_does(self) -> None:
        with barrier(2, ignore, timeout_seconds=0.05) as each:
            give(each, 0, 0)
            with pytest.raises(ClusterError, match="no gradients from trainer 1"):
                each.drain()

    def test_a_trainer_of_which_a_part_is_missing_is_named(self) -> None:
        with barrier(2, ignore, timeout_seconds=0.05, parts=2) as each:
            for trainer, part in ((0, 0), (0, 1), (1, 0)):
                give(each, trainer, 0, part=part)
            with pytest.raises(ClusterError, match="no gradients from trainer 1 for"):
                each.drain()

    def test_a_failing_update_reaches_waiting_and_later_callers(self) -> None:
        def explode(_: list[str]) -> None:
            raise ArithmeticError("bad row")

        with barrier(1, explode) as each:
            waiting = [when(each, 1, nothing), when(each, 5, nothing)]
            norms = [each.norm(0), each.norm(1)]
            give(each, 0, 0)
            for future in waiting:
                with pytest.raises(ArithmeticError, match=r"^bad row$"):
                    answer(future)
            for norm in norms:
                with pytest.raises(ArithmeticError, match=r"^bad row$"):
                    answer(norm)
            for call in later_calls(each):
                with pytest.raises(ArithmeticError, match=r"^bad row$"):
                    call()
            assert each.version == 0

    def test_a_failure_elsewhere_reaches_waiting_and_later_callers(self) -> None:
        with barrier(2, ignore, decided=True) as each, ThreadPoolExecutor(1) as pool:
            give(each, 0, 0)
            lookup, norm = when(each, 1, nothing), each.norm(0)
            draining = pool.submit(each.drain)
            assert not wait([draining], timeout=0.02).done
            each.fail("trainer 1 is gone")
            calls = (lambda: answer(lookup), lambda: answer(norm), lambda: draining.result(PATIENCE_SECONDS))
            for call in (*calls, *later_calls(each)):
                with pytest.raises(ClusterError, match=r"^trainer 1 is gone$"):
                    call()

    def test_a_failure_elsewhere_ends_the_wait_for_a_decision(self) -> None:
        with barrier(1, ignore, decided=True) as each:
            waiting, norm = when(each, 1, nothing), each.norm(0)
            give(each, 0, 0)
            answer(norm)
            each.fail("trainer 0 is gone")
            with pytest.raises(ClusterError, match=r"^trainer 0 is gone$"):
                answer(waiting)
            each._updater.join(PATIENCE_SECONDS)
            assert not each._updater.is_alive()

    def test_the_first_failure_is_the_one_that_is_told(self) -> None:
        with barrier(1, ignore) as each:
            each.fail("the cause")
            each.fail("what followed from it")
            with pytest.raises(ClusterError, match=r"^the cause$"):
                each.drain()


class Clock:
    """Stands in for the module ``time``; ``reads`` counts how often it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = threading.Semaphore(0)

    def monotonic(self) -> float:
        self.reads.release()
        return self.now

    def await_read(self) -> None:
        assert self.reads.acquire(timeout=PATIENCE_SECONDS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    each = Clock()
    monkeypatch.setattr("hybrid.hosting.barrier.time", each)
    return each


def test_a_step_that_is_complete_is_never_overdue(clock: Clock) -> None:
    """The last trainer comes when time is up but before the updater looked: nobody is missing."""
    with barrier(2, ignore) as each:
        give(each, 0, 0)
        clock.await_read()  # when it arrived
        clock.await_read()  # the updater, before it waits for the other
        clock.now = 1000.0
        give(each, 1, 0)
        answer(when(each, 1, nothing))


def test_the_time_of_a_step_counts_from_its_first_contribution(clock: Clock) -> None:
    with barrier(2, ignore) as each:
        waiting = when(each, 1, lambda: "answered")
        clock.now = 1000.0
        give(each, 0, 0)
        give(each, 1, 0)
        assert answer(waiting) == "answered"


def test_who_comes_in_time_gives_the_others_no_more_of_it(clock: Clock) -> None:
    with barrier(3, ignore, timeout_seconds=20.0) as each:
        give(each, 0, 0)
        clock.now = 20.0
        give(each, 1, 0)
        with pytest.raises(ClusterError, match=r"^step 0: no gradients from trainer 2 for 20 s"):
            answer(when(each, 1, nothing))


class TestClose:
    def test_it_fails_waiting_callers_and_may_be_called_twice(self) -> None:
        with barrier(2, ignore) as each:
            waiting, norm = when(each, 1, nothing), each.norm(0)
            give(each, 0, 0)
            each.close()
            with pytest.raises(ClusterError, match="the worker is stopping"):
                answer(waiting)
            with pytest.raises(ClusterError, match="the worker is stopping"):
                answer(norm)
            for call in later_calls(each):
                with pytest.raises(ClusterError, match="the worker is stopping"):
                    call()

    def test_it_answers_the_lookups_of_the_update_under_way(self) -> None:
        gate = Gate()
        with barrier(1, gate) as each, ThreadPoolExecutor(1) as pool:
            futures = [when(each, 1, lambda i=i: i) for i in range(200)]  # type: ignore[misc]
            too_late = when(each, 2, nothing)
            give(each, 0, 0)
            gate.await_entry()
            closing = pool.submit(each.close)
            gate.let_through()
            closing.result(PATIENCE_SECONDS)
            assert [answer(future) for future in futures] == list(range(200))
            with pytest.raises(ClusterError, match="the worker is stopping"):
                answer(too_late)
