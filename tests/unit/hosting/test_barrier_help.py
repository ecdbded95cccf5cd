"""The update barrier where whoever completes an update makes it: in which thread, and what that changes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.barriers import (
    PATIENCE_SECONDS,
    Applied,
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

MODES = [UpdateMode.SYNC, UpdateMode.PIPELINED, UpdateMode.ASYNC]


@pytest.mark.parametrize("mode", MODES)
def test_who_completes_an_update_makes_it_before_it_goes_on(mode: UpdateMode) -> None:
    threads = []
    with barrier(1, lambda _: threads.append(threading.get_ident()), mode) as each:
        for step in range(3):
            give(each, 0, step, updates_here=True)
            assert each.version == step + 1
    assert threads == [threading.get_ident()] * 3


def test_a_share_that_completes_nothing_is_kept() -> None:
    applied: Applied = []
    with barrier(2, applied.append) as each:
        give(each, 1, 0, updates_here=True)
        assert (each.version, applied) == (0, [])
        give(each, 0, 0, updates_here=True)
        assert (each.version, applied) == (1, [["t0s0", "t1s0"]])


def test_nobody_helps_while_another_update_is_under_way() -> None:
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


def test_what_waits_for_a_decision_is_left_to_the_updater() -> None:
    applied: Applied = []
    with barrier(1, applied.append, decided=True) as each:
        give(each, 0, 0, updates_here=True)  # returns, though nobody has decided
        answer(each.norm(0))
        assert applied == []
        each.decide(0, 1.0)
        answer(when(each, 1, nothing))
    assert applied == [["t0s0"]]


def test_an_update_that_fails_is_everybodys_failure() -> None:
    def apply(_: list[str]) -> None:
        raise ClusterError("no room for the update")

    with barrier(1, apply) as each:
        waiting = when(each, 1, nothing)
        give(each, 0, 0, updates_here=True)
        for future in (waiting, when(each, 0, nothing)):
            with pytest.raises(ClusterError, match="no room for the update"):
                answer(future)
        with pytest.raises(ClusterError, match="no room for the update"):
            each.drain()


def test_lookups_of_a_helped_update_are_answered_though_the_barrier_closes() -> None:
    gate = Gate()
    with barrier(1, gate) as each, ThreadPoolExecutor(2) as pool:
        waiting = when(each, 1, lambda: len(gate.applied))
        helper = pool.submit(give, each, 0, 0, updates_here=True)
        gate.await_entry()
        closing = pool.submit(each.close)
        assert not is_done(waiting)
        gate.let_through()
        assert answer(waiting) == 1
        for ended in (helper, closing):
            ended.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("mode", MODES)
def test_trainers_that_help_train_in_step_and_in_order(mode: UpdateMode) -> None:
    num_trainers, num_steps = 4, 50
    applied: Applied = []
    with barrier(num_trainers, applied.append, mode) as each, ThreadPoolExecutor(num_trainers) as pool:

        def train(trainer: int) -> None:
            for step in range(num_steps):
                answer(when(each, step, nothing, trainer))
                give(each, trainer, step, updates_here=True)

        list(pool.map(train, range(num_trainers)))
        each.drain()
    whole = [[f"t{t}s{step}" for t in range(num_trainers)] for step in range(num_steps)]
    if mode is not UpdateMode.ASYNC:
        assert applied == whole
    assert sorted(share for update in applied for share in update) == sorted(
        s for step in whole for s in step
    )


def test_staleness_is_counted_by_whoever_makes_the_update() -> None:
    with barrier(1, ignore) as each:
        for step in range(3):
            give(each, 0, step, updates_here=True)
        assert each.take_staleness().count == 3
