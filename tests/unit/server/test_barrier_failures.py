"""The update barrier where it does not simply go on: decided steps, failures, close."""

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
from hybrid.protocol.update_rules import UpdateMode, UpdateRules


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
    def test_a_trainer_that_does_not_come_is_named(self) -> None:
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

    def test_a_failure_elsewhere_reaches_waiting_and_later_callers(self) -> None:
        with barrier(2, ignore, decided=True) as each, ThreadPoolExecutor(1) as pool:
            give(each, 0, 0)
            waiting = when(each, 1, nothing), each.norm(0)
            draining = pool.submit(each.drain)
            assert not wait([draining], timeout=0.02).done
            each.fail("trainer 1 is gone")
            assert_told(waiting, each, r"^trainer 1 is gone$")
            with pytest.raises(ClusterError, match=r"^trainer 1 is gone$"):
                draining.result(PATIENCE_SECONDS)

    def test_a_failure_elsewhere_ends_the_wait_for_a_decision(self) -> None:
        with barrier(1, ignore, decided=True) as each:
            waiting, norm = when(each, 1, nothing), each.norm(0)
            give(each, 0, 0)
            answer(norm)
            each.fail("trainer 0 is gone")
            with pytest.raises(ClusterError, match=r"^trainer 0 is gone$"):
                answer(waiting)

    def test_the_first_failure_is_the_one_that_is_told(self) -> None:
        with barrier(1, ignore) as each:
            each.fail("the cause")
            each.fail("what followed from it")
            with pytest.raises(ClusterError, match=r"^the cause$"):
                each.drain()


class TestClose:
    def test_it_fails_waiting_callers_and_may_be_called_twice(self) -> None:
        with barrier(2, ignore) as each:
            waiting = when(each, 1, nothing), each.norm(0)
            give(each, 0, 0)
            each.close()
            assert_told(waiting, each, "the worker is stopping")

    def test_it_answers_the_lookups_of_the_update_under_way(self) -> None:
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

    def test_it_answers_lookups_that_an_update_of_another_thread_releases(self) -> None:
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
