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


class TestRefusals:
    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_gradients_sent_twice_are_refused(self, mode: UpdateMode) -> None:
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
    def test_gradients_of_different_batches_are_refused(self, mode: UpdateMode) -> None:
        each = ledger(2, mode)
        for step in (0, 1):
            each.enter(Ticket(0, step, step, checksum=7), "", 0.0)
            if mode is ASYNC:
                assert each.begin_update()
                each.end_update()
        each.enter(Ticket(1, 0, 0, checksum=7), "", 0.0)
        with pytest.raises(DataError, match="step 1: trainers 0 and 1"):
            each.enter(Ticket(1, 1, 1, checksum=8), "", 0.0)

    def test_gradients_after_the_end_of_a_trainer_are_refused(self) -> None:
        each = ledger(2)
        each.finish(1, 2)
        enter(each, 1, 1)
        with pytest.raises(ClusterError, match=r"^trainer 1 .* step 2"):
            enter(each, 1, 2)


def steps_of(each: Ledger[str], trainer: int, until: int) -> list[int]:
    """Return the steps of which a trainer's gradients are accepted."""
    steps = []
    for step in range(until):
        try:
            enter(each, trainer, step)
        except ClusterError:
            continue
        steps.append(step)
    return steps


class TestAbsences:
    def test_finished_trainer_takes_no_part_until_it_rejoins(self) -> None:
        each = ledger(2)
        for first, back in ((2, 4), (5, 7), (8, 8)):
            each.finish(1, first)
            each.rejoin(1, back)
        each.finish(1, 9)
        assert steps_of(each, 1, 12) == [0, 1, 4, 7, 8]
        assert steps_of(each, 0, 12) == list(range(12))

    def test_update_needs_only_present_trainers(self) -> None:
        each = ledger(3)
        for trainer in (2, 1, 0):
            enter(each, trainer, 0)
        each.finish(1, 1)
        assert update(each) == "t0s0p0 t1s0p0 t2s0p0"  # the last step of trainer 1
        enter(each, 2, 1)
        assert not update(each)
        enter(each, 0, 1)
        assert update(each) == "t0s1p0 t2s1p0"
        each.rejoin(1, 3)  # while an earlier step is pending
        for step in (2, 3):
            enter(each, 2, step)
            enter(each, 0, step)
        assert update(each) == "t0s2p0 t2s2p0"
        assert not update(each)
        enter(each, 1, 3)
        assert update(each) == "t0s3p0 t1s3p0 t2s3p0"

    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_pending_steps_survive_an_absence(self, mode: UpdateMode) -> None:
        """A trainer rejoins and finishes again before its first gradients are applied."""
        each = ledger(1, mode)
        each.finish(0, 1)
        each.rejoin(0, 3)
        each.finish(0, 4)
        each.rejoin(0, 6)
        assert [is_ready(each, version) for version in (0, 1)] == [True, False]
        assert steps_of(each, 0, 8) == [0, 3, 6, 7]

    def test_an_absence_from_the_next_step_survives_a_later_one(self) -> None:
        each = ledger(2)
        for trainer in range(2):
            enter(each, trainer, 0)
        assert update(each)
        for first, back in ((1, 2), (3, 4)):
            each.finish(1, first)
            each.rejoin(1, back)
        enter(each, 0, 1)
        assert update(each) == "t0s1p0"
        assert steps_of(each, 1, 5) == [2, 4]


class TestTime:
    def test_timeout_counts_from_the_first_trainer_that_waits(self) -> None:
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
