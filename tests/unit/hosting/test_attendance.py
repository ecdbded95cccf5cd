"""Which steps trainers take part in, and which are behind them."""

from __future__ import annotations

import pytest

from hybrid.hosting.attendance import Attendance


def steps_of(attendance: Attendance, trainer: int, until: int) -> list[int]:
    return [step for step in range(until) if attendance.takes_part(trainer, step)]


def test_everybody_takes_part_in_every_step() -> None:
    attendance = Attendance(2)
    assert [attendance.at(step) for step in (0, 1, 10**9)] == [[0, 1]] * 3
    assert [attendance.next_step(trainer) for trainer in range(2)] == [0, 0]


def test_who_has_finished_takes_no_part_until_it_is_back() -> None:
    attendance = Attendance(2)
    attendance.finish(1, 2)
    assert [attendance.at(step) for step in (1, 2, 10**9)] == [[0, 1], [0], [0]]
    attendance.rejoin(1, 4)
    attendance.finish(1, 5)
    attendance.rejoin(1, 7)
    assert steps_of(attendance, 1, 9) == [0, 1, 4, 7, 8]
    assert steps_of(attendance, 0, 9) == list(range(9))


def test_what_is_applied_is_behind_a_trainer_and_no_other() -> None:
    attendance = Attendance(2)
    attendance.apply(0, 0)
    attendance.apply(0, 1)
    assert [attendance.is_applied(trainer, 1) for trainer in range(2)] == [True, False]
    assert not attendance.is_applied(0, 2)
    assert [attendance.next_step(trainer) for trainer in range(2)] == [2, 0]


def test_the_next_step_is_one_that_the_trainer_takes_part_in() -> None:
    attendance = Attendance(1)
    next_steps = []
    for first, back in ((1, 3), (3, 4), (5, 5)):
        attendance.finish(0, first)
        attendance.rejoin(0, back)
    for step in steps_of(attendance, 0, 7):
        next_steps.append(attendance.next_step(0))
        attendance.apply(0, step)
    assert next_steps == [0, 4, 5, 6]


def test_steps_with_gradients_under_way_stay_those_of_before_an_absence() -> None:
    """A trainer is back, and away again, before what it sent first is applied."""
    attendance = Attendance(1)
    attendance.finish(0, 1)
    attendance.rejoin(0, 3)
    attendance.finish(0, 4)
    attendance.rejoin(0, 6)
    assert attendance.next_step(0) == 0
    assert steps_of(attendance, 0, 8) == [0, 3, 6, 7]


@pytest.mark.parametrize("step", [2, 9])
def test_a_restart_ends_absences_wherever_it_goes(step: int) -> None:
    attendance = Attendance(2)
    attendance.finish(0, 3)
    attendance.apply(1, 5)
    attendance.restart(step)
    attendance.rejoin(0, step + 2)  # nothing to come back from
    assert attendance.at(step) == attendance.at(step + 1) == [0, 1]
    assert [attendance.next_step(trainer) for trainer in range(2)] == [step, step]
    assert attendance.is_applied(0, step - 1)
    assert not attendance.is_applied(1, step)
