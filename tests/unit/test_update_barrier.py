"""The update barrier: order, waiting, failure and the end of its threads. No test sleeps; events meet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import pytest
from torch.futures import Future

from hybrid.embedding.update import UpdateBarrier, UpdateMode
from hybrid.errors import ClusterError

PATIENCE_SECONDS = 10.0
Applied = list[list[str]]
Result = TypeVar("Result")


@contextmanager
def barrier(
    num_trainers: int,
    apply: Callable[[list[str]], None],
    mode: UpdateMode = UpdateMode.SYNC,
    timeout_seconds: float = PATIENCE_SECONDS,
) -> Iterator[UpdateBarrier[str]]:
    """A barrier whose threads are gone when the block ends."""
    before = set(threading.enumerate())
    each = UpdateBarrier(num_trainers, apply, timeout_seconds, mode)
    try:
        yield each
    finally:
        each.close()
    assert set(threading.enumerate()) <= before


def answer(future: Future[Result]) -> Result:
    """What ``future`` holds or raises; a bare ``wait`` would hold up even pytest's timeout."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(PATIENCE_SECONDS), "nobody answered"
    return future.wait()


class Gate:
    """An ``apply`` that stops at each update until let through, and remembers what it was given."""

    def __init__(self) -> None:
        self.applied: Applied = []
        self.entered = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def __call__(self, contributions: list[str]) -> None:
        self.entered.release()
        assert self._open.acquire(timeout=PATIENCE_SECONDS)
        self.applied.append(contributions)

    def await_entry(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_SECONDS)

    def let_through(self) -> None:
        self._open.release()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_contributions_meet_in_trainer_order(order: tuple[int, ...]) -> None:
    applied: Applied = []
    with barrier(3, applied.append) as each:
        for step in range(2):
            for trainer in order:
                each.contribute(trainer, step, f"t{trainer}s{step}")
            answer(each.when(step + 1, lambda: None))
        assert each.version == 2
    assert applied == [[f"t{t}s{step}" for t in range(3)] for step in range(2)]


def test_trainers_in_threads_train_in_step_and_in_order() -> None:
    num_trainers, num_steps = 6, 50
    applied: Applied = []
    with barrier(num_trainers, applied.append) as each, ThreadPoolExecutor(num_trainers) as pool:

        def train(trainer: int) -> list[int]:
            seen = []
            for step in range(num_steps):
                seen.append(answer(each.when(step, lambda: len(applied))))
                each.contribute(trainer, step, f"t{trainer}s{step}")
            return seen

        for seen in pool.map(train, range(num_trainers)):
            assert seen == list(range(num_steps))
        each.drain()
    assert applied == [[f"t{t}s{step}" for t in range(num_trainers)] for step in range(num_steps)]


def test_a_lookup_waits_for_the_version_that_it_asked_for() -> None:
    gate = Gate()
    with barrier(1, gate) as each:
        assert each.when(0, lambda: "at once").done()
        first, second = each.when(1, lambda: len(gate.applied)), each.when(2, lambda: len(gate.applied))
        each.contribute(0, 0, "a")
        gate.await_entry()
        assert not first.done()  # the update is under way
        gate.let_through()
        assert answer(first) == 1
        assert not second.done()
        each.contribute(0, 1, "b")
        gate.let_through()
        assert answer(second) == 2


def test_waiting_lookups_hold_no_thread() -> None:
    with barrier(1, lambda _: None) as each:
        before = threading.active_count()
        futures = [each.when(1, lambda i=i: i) for i in range(500)]  # type: ignore[misc]
        assert threading.active_count() == before
        assert not any(future.done() for future in futures)
        each.contribute(0, 0, "a")
        assert [answer(future) for future in futures] == list(range(500))


def test_a_failing_lookup_fails_alone() -> None:
    with barrier(1, lambda _: None) as each:
        at_once, later, fine = each.when(0, fail), each.when(1, fail), each.when(1, lambda: "fine")
        each.contribute(0, 0, "a")
        assert answer(fine) == "fine"
        for future in (at_once, later):
            with pytest.raises(ZeroDivisionError):
                answer(future)


def fail() -> float:
    return 1 / 0


def test_asynchronous_lookups_wait_for_their_own_trainers_updates_only() -> None:
    gate = Gate()
    with barrier(2, gate, UpdateMode.ASYNC) as each:
        assert each.when(99, lambda: "at once").done()
        each.contribute(1, 7, "t1s7")
        gate.await_entry()
        each.contribute(1, 8, "t1s8")  # while the update is under way
        each.contribute(0, 7, "t0s7")
        assert answer(each.when(9, lambda: len(gate.applied), trainer=2)) == 0
        own = [each.when(9, lambda: len(gate.applied), trainer=t) for t in (0, 1)]
        assert not any(future.done() for future in own)
        for _ in range(3):
            gate.let_through()
        assert [answer(future) for future in own] == [3, 2]  # each sees what it handed in itself
        each.drain()
        assert each.version == 3
    assert gate.applied == [["t1s7"], ["t1s8"], ["t0s7"]]


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_drain_returns_after_the_update_under_way(mode: UpdateMode) -> None:
    gate = Gate()
    with barrier(1, gate, mode) as each, ThreadPoolExecutor(1) as pool:
        each.drain()  # nothing is under way
        each.contribute(0, 0, "a")
        gate.await_entry()
        drained = pool.submit(each.drain)
        assert not wait([drained], timeout=0.02).done
        gate.let_through()
        drained.result(PATIENCE_SECONDS)
        assert gate.applied == [["a"]]


def test_a_trainer_that_does_not_come_is_named() -> None:
    with barrier(3, lambda _: None, timeout_seconds=0.05) as each:
        waiting = each.when(1, lambda: None)
        each.contribute(1, 0, "a")
        missing = "trainer 0, trainer 2"
        message = rf"^step 0: no gradients from {missing} for 0.05 s \(cluster.step_timeout_seconds\)$"
        with pytest.raises(ClusterError, match=message):
            answer(waiting)
        with pytest.raises(ClusterError, match=message):
            each.contribute(0, 0, "late")
        with pytest.raises(ClusterError, match=message):
            each.when(0, lambda: None)
        with pytest.raises(ClusterError, match=message):
            each.drain()


def test_draining_a_step_that_lacks_a_trainer_fails_when_the_step_does() -> None:
    with barrier(2, lambda _: None, timeout_seconds=0.05) as each:
        each.contribute(0, 0, "a")
        with pytest.raises(ClusterError, match="no gradients from trainer 1"):
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
    monkeypatch.setattr("hybrid.embedding.update.time", each)
    return each


def test_a_step_that_is_complete_is_never_overdue(clock: Clock) -> None:
    """The last trainer comes when time is up but before the updater looked: nobody is missing."""
    with barrier(2, lambda _: None) as each:
        each.contribute(0, 0, "a")
        clock.await_read()  # when it arrived
        clock.await_read()  # the updater, before it waits for the other
        clock.now = 1000.0
        each.contribute(1, 0, "b")
        answer(each.when(1, lambda: None))


def test_the_time_of_a_step_counts_from_its_first_contribution(clock: Clock) -> None:
    with barrier(2, lambda _: None) as each:
        waiting = each.when(1, lambda: "answered")
        clock.now = 1000.0
        each.contribute(0, 0, "a")
        each.contribute(1, 0, "b")
        assert answer(waiting) == "answered"


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_a_second_contribution_to_a_step_under_way_is_refused(mode: UpdateMode) -> None:
    gate = Gate()
    with barrier(2, gate, mode) as each:
        each.contribute(1, 9, "another's")
        if mode is UpdateMode.ASYNC:
            gate.await_entry()
        each.contribute(0, 1, "a")
        with pytest.raises(ClusterError, match=r"^trainer 0 sent gradients of step 1 twice$"):
            each.contribute(0, 1, "again")
        gate.let_through()
        gate.let_through()


def test_a_contribution_to_a_step_that_is_done_is_refused() -> None:
    applied: Applied = []
    with barrier(1, applied.append) as each:
        each.contribute(0, 0, "a")
        each.drain()
        with pytest.raises(ClusterError, match=r"^trainer 0 sent gradients of step 0 twice$"):
            each.contribute(0, 0, "again")
    assert applied == [["a"]]


def test_a_failing_update_reaches_waiting_and_later_callers() -> None:
    def explode(_: list[str]) -> None:
        raise ArithmeticError("bad row")

    with barrier(1, explode) as each:
        waiting = [each.when(1, lambda: None), each.when(5, lambda: None)]
        each.contribute(0, 0, "a")
        for future in waiting:
            with pytest.raises(ArithmeticError, match=r"^bad row$"):
                answer(future)
        later: list[Callable[[], object]] = [
            lambda: each.when(0, lambda: None),
            lambda: each.contribute(0, 1, "b"),
            each.drain,
        ]
        for call in later:
            with pytest.raises(ArithmeticError, match=r"^bad row$"):
                call()
        assert each.version == 0


def test_close_fails_waiting_lookups_and_may_be_called_twice() -> None:
    with barrier(2, lambda _: None) as each:
        waiting = each.when(1, lambda: None)
        each.contribute(0, 0, "a")
        each.close()
        with pytest.raises(ClusterError, match="the worker is stopping"):
            answer(waiting)
        with pytest.raises(ClusterError, match="the worker is stopping"):
            each.contribute(1, 0, "b")


def test_close_during_an_update_still_answers_the_lookups_of_that_update() -> None:
    gate = Gate()
    with barrier(1, gate) as each, ThreadPoolExecutor(1) as pool:
        futures = [each.when(1, lambda i=i: i) for i in range(200)]  # type: ignore[misc]
        too_late = each.when(2, lambda: None)
        each.contribute(0, 0, "a")
        gate.await_entry()
        closing = pool.submit(each.close)
        gate.let_through()
        closing.result(PATIENCE_SECONDS)
        assert [answer(future) for future in futures] == list(range(200))
        with pytest.raises(ClusterError, match="the worker is stopping"):
            answer(too_late)


def test_restart_counts_on_from_a_checkpoint() -> None:
    applied: Applied = []
    with barrier(1, applied.append) as each:
        each.restart(293)
        assert each.version == 293
        assert each.when(293, lambda: "at once").done()
        later = each.when(294, lambda: len(applied))
        each.contribute(0, 293, "a")
        assert answer(later) == 1


def test_restart_is_refused_while_something_is_under_way() -> None:
    gate = Gate()
    with barrier(1, gate) as each:
        each.contribute(0, 0, "a")
        gate.await_entry()
        with pytest.raises(AssertionError):
            each.restart(5)
        gate.let_through()
        each.drain()
        each.restart(5)
        assert each.version == 5
