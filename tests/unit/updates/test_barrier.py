"""The update barrier: what updates and lookups wait for, in which thread, and how failures end the wait."""

import gc
import itertools
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future as Future_, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest
from torch.futures import Future

from hybrid.errors import ClusterError, DataError
from hybrid.primitives.step_timings import OpenSpan, StepClock
from hybrid.updates.barrier import Update, UpdateBarrier
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

PATIENCE_SECONDS = 10.0
NORM = 7.0
Applied = list[list[str]]
Barrier = UpdateBarrier[str]
Result = TypeVar("Result")


class Merged:
    """An update that passes its contributions, with their factor, to ``apply``."""

    def __init__(self, contributions: list[str], apply: Callable[[list[str]], None], step: int = 0) -> None:
        self._contributions = contributions
        self._apply = apply
        self._norm = NORM + step

    def squared_norm(self) -> float:
        return self._norm

    def apply(self, scale: float) -> None:
        scaled = self._contributions if scale == 1.0 else [f"{scale}*{c}" for c in self._contributions]
        self._apply(scaled)


@contextmanager
def barrier(
    num_trainers: int,
    apply: Callable[[list[str]], None],
    mode: UpdateMode = UpdateMode.SYNC,
    timeout_seconds: float = 2 * PATIENCE_SECONDS,
    *,
    micro_batches: int = 1,
    decided: bool = False,
    clock: StepClock | None = None,
    prepare_step: Callable[[int], object] | None = None,
) -> Iterator[Barrier]:
    """Yield a barrier whose threads have ended when the block ends."""

    def merge(step: int, contributions: list[str]) -> Update:
        return Merged(contributions, apply, step)

    before = set(threading.enumerate())
    rules = UpdateRules(
        num_trainers, mode, micro_batches, check_finite=not decided, timeout_seconds=timeout_seconds
    )
    each = Barrier(rules, merge, clock, prepare_step)
    try:
        yield each
    finally:
        each.close()
    assert set(threading.enumerate()) <= before


def look_up(each: Barrier, version: int, work: Callable[[], Result], trainer: int = 0) -> Future[Result]:
    """A lookup for step ``version`` that must see all updates before it."""
    return each.run_when_ready(Ticket(trainer, version, version), work)


def contribute(
    each: Barrier,
    trainer: int,
    step: int,
    contribution: str = "",
    *,
    index: int = 0,
    should_update_here: bool = False,
) -> None:
    ticket = Ticket(trainer, step, step, index, Purpose.PREFETCH)
    each.contribute(ticket, contribution or f"t{trainer}s{step}", should_update_here=should_update_here)


def nothing() -> None:
    """A lookup of which only the time matters."""


def ignore(contributions: list[str]) -> None:
    """An update of which only the time matters."""


def result_of(future: Future[Result]) -> Result:
    """Return the result of ``future``; a bare ``wait`` would block even pytest's timeout."""
    assert is_done(future, PATIENCE_SECONDS), "the lookup has not run"
    return future.wait()


def is_done(future: Future[Result], within_seconds: float = 0.02) -> bool:
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(within_seconds)


class Gate:
    """An ``apply`` that blocks each update until it is released, and records it."""

    def __init__(self) -> None:
        self.applied: Applied = []
        self.entered = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def __call__(self, contributions: list[str]) -> None:
        self.entered.release()
        assert self._open.acquire(timeout=PATIENCE_SECONDS)
        self.applied.append(contributions)

    def await_update(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_SECONDS)

    def release(self) -> None:
        self._open.release()


class TestLookups:
    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_lookup_waits_for_its_version(self, mode: UpdateMode) -> None:
        gate = Gate()
        with barrier(1, gate, mode) as each:
            assert look_up(each, 0, lambda: "at once").done()
            first, second = (look_up(each, version, lambda: len(gate.applied)) for version in (1, 2))
            contribute(each, 0, 0)
            gate.await_update()
            during = look_up(each, 1, lambda: len(gate.applied))
            assert not first.done()  # the update is under way
            assert not during.done()
            gate.release()
            assert (result_of(first), result_of(during)) == (1, 1)
            assert not second.done()
            contribute(each, 0, 1)
            gate.release()
            assert result_of(second) == 2

    def test_waiting_lookups_hold_no_thread(self) -> None:
        with barrier(1, ignore) as each:
            before = threading.active_count()
            futures = [look_up(each, 1, partial(int, i)) for i in range(500)]
            assert threading.active_count() <= before  # threads of other tests may end
            assert not any(future.done() for future in futures)
            contribute(each, 0, 0)
            assert [result_of(future) for future in futures] == list(range(500))

    def test_failing_lookup_does_not_affect_others(self) -> None:
        def fail() -> float:
            return 1 / 0

        with barrier(1, ignore) as each:
            at_once, later = (look_up(each, version, fail) for version in (0, 1))
            fine = look_up(each, 1, lambda: "fine")
            contribute(each, 0, 0)
            assert result_of(fine) == "fine"
            for future in (at_once, later):
                with pytest.raises(ZeroDivisionError):
                    result_of(future)

    def test_next_step_is_prepared_after_its_lookups_have_run(self) -> None:
        events: list[str] = []

        def prepare(step: int) -> None:
            events.append(f"prepare {step}")

        with barrier(1, ignore, UpdateMode.LOOKAHEAD, prepare_step=prepare) as each:
            for index, is_large in enumerate((False, True, True)):
                ticket = Ticket(0, 1, 1, index, Purpose.PREFETCH)
                each.run_when_ready(ticket, lambda: events.append("lookup"), is_large=is_large)
            contribute(each, 0, 0, should_update_here=True)
        assert events == ["lookup"] * 3 + ["prepare 1"]

    def test_new_lookup_replaces_a_waiting_one(self) -> None:
        """A script that leaves its batches sends the ids of other batches for the same steps."""
        with barrier(1, ignore, UpdateMode.LOOKAHEAD) as each:
            ticket = Ticket(0, 1, 1, 0, Purpose.PREFETCH)
            left = each.run_when_ready(ticket, lambda: "left")
            new = each.run_when_ready(ticket, lambda: "new")
            with pytest.raises(ClusterError, match="step 1"):
                result_of(left)
            contribute(each, 0, 0)
            assert result_of(new) == "new"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", list(UpdateMode))
def test_threads_of_trainers_train_in_order(mode: UpdateMode, seed: int) -> None:
    """Gradients, and lookups of the next step or the one after, arrive in any order."""
    num_trainers, num_steps, micro_batches = 4, 30, 2
    distance = 1 if mode is UpdateMode.SYNC else 2
    age = 1 if mode is UpdateMode.ASYNC else 0
    applied: Applied = []
    with (
        barrier(num_trainers, applied.append, mode, micro_batches=micro_batches) as each,
        ThreadPoolExecutor(num_trainers) as pool,
    ):

        def train(trainer: int) -> list[int]:
            chance = random.Random(100 * seed + trainer)
            lookups: list[list[Future[int]]] = [[] for _ in range(num_steps)]

            def updates_of_trainer() -> int:
                own = [text for of in list(applied) for text in of if text.startswith(f"t{trainer}")]
                return len(own) // micro_batches

            def look_up(step: int, index: int) -> None:
                if step < num_steps:
                    ticket = Ticket(trainer, step, max(0, step - age), index, Purpose.PREFETCH)
                    lookups[step].append(each.run_when_ready(ticket, updates_of_trainer))

            def send(step: int, index: int) -> None:
                text, should_update_here = f"t{trainer}s{step}p{index}", chance.random() < 0.5
                contribute(each, trainer, step, text, index=index, should_update_here=should_update_here)

            for step, index in itertools.product(range(distance), range(micro_batches)):
                look_up(step, index)
            seen = []
            for step in range(num_steps):
                seen += [result_of(lookup) for lookup in lookups[step]]
                events = [*itertools.product([send], [step], range(micro_batches))]
                events += itertools.product([look_up], [step + distance], range(micro_batches))
                for do, of_step, index in chance.sample(events, len(events)):
                    do(of_step, index)
            return seen

        fewest = [max(0, step - age) for step in range(num_steps) for _ in range(micro_batches)]
        for seen in pool.map(train, range(num_trainers)):
            assert all(map(int.__ge__, seen, fewest))
            assert mode is UpdateMode.ASYNC or seen == fewest
        each.drain()
    trainers_indices = list(itertools.product(range(num_trainers), range(micro_batches)))
    whole = [[f"t{t}s{step}p{index}" for t, index in trainers_indices] for step in range(num_steps)]
    assert mode is UpdateMode.ASYNC or applied == whole
    assert sorted(itertools.chain(*applied)) == sorted(itertools.chain(*whole))


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_last_contribution_runs_the_update_in_its_thread(mode: UpdateMode) -> None:
    threads = []
    with barrier(1, lambda _: threads.append(threading.get_ident()), mode, micro_batches=2) as each:
        for step in range(3):
            waiting = look_up(each, step + 1, nothing)
            for index in range(2):
                assert not waiting.done()
                contribute(each, 0, step, index=index, should_update_here=True)
            assert waiting.done()
    assert threads == [threading.get_ident()] * 3


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_drain_waits_for_the_running_update(mode: UpdateMode) -> None:
    gate = Gate()
    with barrier(1, gate, mode) as each, ThreadPoolExecutor(1) as pool:
        each.drain()  # nothing is under way
        contribute(each, 0, 0)
        gate.await_update()
        drained = pool.submit(each.drain)
        assert not wait([drained], timeout=0.02).done
        gate.release()
        drained.result(PATIENCE_SECONDS)
        assert gate.applied == [["t0s0"]]


class TestRestart:
    def test_restart_continues_from_a_version(self) -> None:
        applied: Applied = []
        with barrier(1, applied.append) as each:
            each.restart(293)
            assert look_up(each, 293, lambda: "at once").done()
            later = look_up(each, 294, lambda: len(applied))
            contribute(each, 0, 293)
            assert result_of(later) == 1
            waiting = look_up(each, 295, lambda: len(applied))
            each.restart(294)
            with pytest.raises(ClusterError, match="checkpoint"):
                result_of(waiting)

    def test_restart_may_go_back_to_decided_steps(self) -> None:
        with barrier(1, ignore, decided=True) as each:
            for start in (7, 5):
                each.restart(start)
                norm = each.squared_norm(start)
                assert not norm.done()
                contribute(each, 0, start)
                assert result_of(norm) == NORM + start
                each.set_scale(start, 1.0)
                each.drain()


def assert_all_fail(
    waiting: Iterable[Future[Any]], each: Barrier, message: str, kind: type[Exception] = ClusterError
) -> None:
    """Check that pending and later calls raise a failure."""
    calls: list[Callable[[], object]] = [
        *(partial(result_of, future) for future in waiting),
        lambda: result_of(look_up(each, 0, nothing)),
        lambda: contribute(each, 0, 1),
        lambda: result_of(each.squared_norm(1)),
        each.drain,
    ]
    for call in calls:
        with pytest.raises(kind, match=message):
            call()


class TestDecided:
    """Steps that wait for the decision of the trainers."""

    def test_norm_is_known_once_all_gradients_arrived(self) -> None:
        applied: Applied = []
        with barrier(2, applied.append, decided=True) as each:
            contribute(each, 1, 0)
            early, next_one = each.squared_norm(0), each.squared_norm(1)
            assert not is_done(early)
            contribute(each, 0, 0)
            assert result_of(early) == NORM
            assert each.squared_norm(0).done()  # a late call
            assert result_of(each.squared_norm(0)) == NORM
            assert applied == []
            each.set_scale(0, 0.5)
            result_of(look_up(each, 1, nothing))
            assert applied == [["0.5*t0s0", "0.5*t1s0"]]
            assert result_of(each.squared_norm(0)) == NORM  # even after the update
            assert not next_one.done()
            for trainer in range(2):
                contribute(each, trainer, 1)
            assert result_of(next_one) == NORM + 1
            each.set_scale(1, 1.0)
            each.drain()
        assert applied[1] == ["t0s1", "t1s1"]

    def test_an_undecided_step_is_an_error(self) -> None:
        message = r"^step 0: .* trainer 0 .*cluster\.timeout_seconds"
        applied: Applied = []
        with barrier(1, applied.append, decided=True, timeout_seconds=0.05) as each:
            waiting = look_up(each, 1, nothing)
            contribute(each, 0, 0)
            assert not is_done(waiting, 0.1)  # the trainers may pause before they request the norm
            result_of(each.squared_norm(0))
            assert_all_fail([waiting], each, message)
        assert applied == []

    def test_close_ends_the_wait_for_a_decision(self) -> None:
        with barrier(1, ignore, decided=True) as each, ThreadPoolExecutor(1) as pool:
            norm = each.squared_norm(0)
            contribute(each, 0, 0)
            result_of(norm)
            pool.submit(each.close).result(PATIENCE_SECONDS)


class TestFailure:
    def test_missing_trainers_are_named(self) -> None:
        with barrier(3, ignore, timeout_seconds=0.05) as each:
            waiting = look_up(each, 1, nothing)
            contribute(each, 1, 0)
            assert_all_fail([waiting], each, r"^step 0: .* trainer 0, trainer 2 .*cluster\.timeout_seconds")

    @pytest.mark.parametrize("should_update_here", [False, True])
    def test_a_failing_update_reaches_waiting_and_later_callers(self, should_update_here: bool) -> None:
        def explode(_: list[str]) -> None:
            raise ArithmeticError("bad row")

        with barrier(1, explode) as each:
            waiting = [look_up(each, 1, nothing), look_up(each, 5, nothing)]
            norms = [each.squared_norm(0), each.squared_norm(1)]
            contribute(each, 0, 0, should_update_here=should_update_here)
            assert_all_fail([*waiting, *norms], each, r"^bad row$", ArithmeticError)

    def test_trainers_that_read_different_batches_are_named(self) -> None:
        """Also if the other trainer's gradients of the step were applied earlier."""
        with barrier(2, ignore, UpdateMode.ASYNC) as each:
            for trainer, step in ((0, 0), (0, 1), (1, 0)):
                each.contribute(Ticket(trainer, step, step, checksum=5 + step), "")
                each.drain()
            with pytest.raises(DataError, match=r"^step 1: trainers 0 and 1 "):
                each.contribute(Ticket(1, 1, 1, checksum=5), "")

    def test_remote_failure_reaches_waiting_and_later_callers(self) -> None:
        with barrier(2, ignore, decided=True) as each, ThreadPoolExecutor(1) as pool:
            contribute(each, 0, 0)
            waiting = look_up(each, 1, nothing), each.squared_norm(0)
            draining = pool.submit(each.drain)
            assert not wait([draining], timeout=0.02).done
            each.fail("trainer 1 is gone")
            assert_all_fail(waiting, each, "^trainer 1 ")
            with pytest.raises(ClusterError, match=r"^trainer 1 "):
                draining.result(PATIENCE_SECONDS)


class TestClose:
    def test_close_fails_waiting_callers_and_is_idempotent(self) -> None:
        with barrier(2, ignore) as each:
            waiting = look_up(each, 1, nothing), each.squared_norm(0)
            contribute(each, 0, 0)
            each.close()
            assert_all_fail(waiting, each, "stopping")

    def test_close_waits_for_the_running_update_and_its_lookups(self) -> None:
        gate = Gate()
        with barrier(1, gate) as each, ThreadPoolExecutor(1) as pool:
            futures = [look_up(each, 1, partial(int, i)) for i in range(200)]
            later = look_up(each, 2, nothing)
            contribute(each, 0, 0)
            gate.await_update()
            closing = pool.submit(each.close)
            assert not wait([closing], timeout=0.02).done
            gate.release()
            closing.result(PATIENCE_SECONDS)
            assert [result_of(future) for future in futures] == list(range(200))
            with pytest.raises(ClusterError, match="stopping"):
                result_of(later)

    def test_close_answers_lookups_released_by_another_thread(self) -> None:
        """That thread may be slow, and no update is running any more."""

        class SlowSpan(OpenSpan):
            def close(self) -> None:
                closing.append(pool.submit(each.close))
                wait(closing, timeout=0.2)

        class SlowClock(StepClock):
            def begin(self, *_: object, **__: object) -> OpenSpan:
                return SlowSpan([], "wait", 1, None, 0)

        closing: list[Future_[None]] = []
        with barrier(1, ignore, clock=SlowClock()) as each, ThreadPoolExecutor(1) as pool:
            waiting = look_up(each, 1, lambda: "answered")
            contribute(each, 0, 0, should_update_here=True)
            assert result_of(waiting) == "answered"
            closing[0].result(PATIENCE_SECONDS)


def test_steps_leave_no_memory_behind() -> None:
    """Each step has a prefetched lookup, and an announced number of contributions."""

    def train_steps(steps: range) -> None:
        for step in steps:
            looking_up = each.run_when_ready(Ticket(0, step + 1, step + 1, 0, Purpose.PREFETCH), nothing)
            each.set_num_lookups(0, step, 2)
            for index in range(2):
                contribute(each, 0, step, index=index, should_update_here=True)
            result_of(looking_up)

    with barrier(1, ignore, UpdateMode.LOOKAHEAD) as each:
        train_steps(range(100))
        tracemalloc.start()
        try:
            train_steps(range(100, 1100))
            gc.collect()  # of the tuples that Python keeps for reuse
            assert tracemalloc.get_traced_memory()[0] < 50_000
        finally:
            tracemalloc.stop()
