"""The rules of the update barrier: the contributions of an update, and the version that a lookup sees."""

import pytest

from hybrid.errors import ClusterError, DataError
from hybrid.updates.ledger import Ledger
from hybrid.updates.ticket import Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

SYNC, LOOKAHEAD, ASYNC = UpdateMode


def ledger(
    num_trainers: int, mode: UpdateMode = SYNC, micro_batches: int = 1, version: int = 0
) -> Ledger[str]:
    return Ledger(UpdateRules(num_trainers, mode, micro_batches, timeout_seconds=20.0), version)


def enter(each: Ledger[str], trainer: int, step: int, index: int = 0, now: float = 0.0) -> None:
    each.enter(Ticket(trainer, step, step, index), f"t{trainer}s{step}p{index}", now)


def update(each: Ledger[str]) -> str:
    """Apply the next update, and return its contributions; empty if there is none."""
    if (taken := each.begin_update()) is None:
        return ""
    each.end_update()
    return " ".join(taken[1])


def is_ready(each: Ledger[str], version: int, trainer: int = 0) -> bool:
    return each.is_ready(Ticket(trainer, version, version))


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_gradients_sent_twice_are_refused(mode: UpdateMode) -> None:
    each = ledger(2, mode)
    message = "^trainer 0 .* step 0 twice"
    enter(each, 0, 0)
    with pytest.raises(ClusterError, match=message):
        enter(each, 0, 0)
    enter(each, 1, 0)
    assert each.begin_update()
    with pytest.raises(ClusterError, match=message):
        enter(each, 0, 0)
    each.end_update()
    with pytest.raises(ClusterError, match=message):
        enter(each, 0, 0)
    assert each.is_idle  # refused gradients are not kept
    enter(each, 0, 1)


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_gradients_of_different_batches_are_refused(mode: UpdateMode) -> None:
    each = ledger(2, mode)
    for step in (0, 1):
        each.enter(Ticket(0, step, step, checksum=7), "", 0.0)
        if mode is ASYNC:
            assert each.begin_update()
            each.end_update()
    each.enter(Ticket(1, 0, 0, checksum=7), "", 0.0)
    with pytest.raises(DataError, match="step 1: trainers 0 and 1"):
        each.enter(Ticket(1, 1, 1, checksum=8), "", 0.0)


def test_timeout_counts_from_the_first_trainer_that_waits() -> None:
    each = ledger(3, micro_batches=2)
    assert each.seconds_left(1000.0) is None
    for index in range(2):
        enter(each, 0, 1, index, now=1000.0)
    enter(each, 1, 0, 0, now=1000.0)
    assert each.seconds_left(2000.0) is None  # gradients of a later step, and of one micro-batch
    enter(each, 1, 0, 1, now=2000.0)
    for index in range(2):
        enter(each, 2, 0, index, now=2019.0)  # does not extend the time of the others
    assert each.seconds_left(2019.5) == 0.5
