"""The rules of the update barrier: what an update is of, and what a lookup sees."""

import pytest

from hybrid.errors import ClusterError
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import Staleness, UpdateMode, UpdateRules
from hybrid.server.ledger import Ledger

SYNC, PIPELINED, ASYNC = UpdateMode


def ledger(num_trainers: int, mode: UpdateMode = SYNC, parts: int = 1, version: int = 0) -> Ledger[str]:
    return Ledger(UpdateRules(num_trainers, mode, parts, timeout_seconds=20.0), version)


def give(
    each: Ledger[str], trainer: int, step: int, part: int = 0, followed: bool = False, now: float = 0.0
) -> None:
    ticket = Ticket(trainer, step, step, part, followed=followed)
    each.enter(ticket, f"t{trainer}s{step}p{part}", step, now)


def serve(each: Ledger[str], trainer: int, step: int) -> None:
    each.serve(Ticket(trainer, step, max(0, step - 1), purpose=Purpose.PREFETCH))


def update(each: Ledger[str]) -> str:
    """What the next update is of, which is applied; nothing where there is none."""
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
        message = r"^trainer 0 sent gradients of step 0 twice$"
        give(each, 0, 0)
        with pytest.raises(ClusterError, match=message):
            give(each, 0, 0)
        give(each, 1, 0)
        assert each.begin_update()
        with pytest.raises(ClusterError, match=message):
            give(each, 0, 0)
        each.end_update()
        with pytest.raises(ClusterError, match=message):
            give(each, 0, 0)
        assert each.is_idle  # what was refused has left nothing
        give(each, 0, 1)

    def test_gradients_after_the_end_of_a_trainer_are_refused(self) -> None:
        each = ledger(2)
        each.finish(1, 2)
        give(each, 1, 1)
        with pytest.raises(ClusterError, match=r"^trainer 1 sent gradients of step 2 after its end$"):
            give(each, 1, 2)


def steps_of(each: Ledger[str], trainer: int, until: int) -> list[int]:
    """The steps of which a trainer's gradients are taken."""
    steps = []
    for step in range(until):
        try:
            give(each, trainer, step)
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
            give(each, trainer, 0)
        each.finish(1, 1)
        assert update(each) == "t0s0p0 t1s0p0 t2s0p0"  # its last step has all
        give(each, 2, 1)
        assert not update(each)
        give(each, 0, 1)
        assert update(each) == "t0s1p0 t2s1p0"
        each.rejoin(1, 3)  # while an earlier step is under way
        for step in (2, 3):
            give(each, 2, step)
            give(each, 0, step)
        assert update(each) == "t0s2p0 t2s2p0"
        assert not update(each)
        give(each, 1, 3)
        assert update(each) == "t0s3p0 t1s3p0 t2s3p0"

    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_pending_steps_survive_an_absence(self, mode: UpdateMode) -> None:
        """A trainer is back, and away again, before what it sent first is applied."""
        each = ledger(1, mode)
        each.finish(0, 1)
        each.rejoin(0, 3)
        each.finish(0, 4)
        each.rejoin(0, 6)
        assert [is_ready(each, version) for version in (0, 1)] == [True, False]
        assert steps_of(each, 0, 8) == [0, 3, 6, 7]


class TestTime:
    def test_timeout_counts_from_the_first_gradients_of_the_step(self) -> None:
        each = ledger(3)
        assert each.seconds_left(1000.0) is None
        give(each, 0, 1, now=1000.0)
        assert each.seconds_left(2000.0) is None  # of a later step
        give(each, 1, 0, now=2000.0)
        give(each, 2, 0, now=2019.0)  # which gives the others no more of it
        assert each.seconds_left(2019.5) == 0.5

    def test_timeout_names_missing_trainers(self) -> None:
        each = ledger(4, parts=2)
        each.finish(3, 0)
        for trainer, part in ((1, 0), (1, 1), (2, 0)):
            give(each, trainer, 0, part)
        message = r"^step 0: no gradients from trainer 0, trainer 2 for 20 s \(cluster.timeout_seconds\)$"
        with pytest.raises(ClusterError, match=message):
            each.seconds_left(20.0)

    def test_timeout_names_trainers_without_a_served_prefetch(self) -> None:
        each = ledger(2, PIPELINED)
        for trainer in range(2):
            give(each, trainer, 0, followed=True)
        serve(each, 0, 1)
        with pytest.raises(ClusterError, match="no gradients from trainer 1 for"):
            each.seconds_left(20.0)


@pytest.mark.parametrize(
    ("read_at", "staleness"),
    [
        ({(0, 0): 5, (1, 0): 2, (2, 0): 4}, Staleness(3, 4, 3)),
        ({(0, 0): 4, (0, 1): 2}, Staleness(1, 3, 3)),
        ({(0, 0): 2, (0, 1): 4}, Staleness(1, 3, 3)),
    ],
    ids=["every trainer counts", "by its oldest part, the last", "or the first"],
)
def test_staleness_counts_updates_since_the_rows_were_read(
    read_at: dict[tuple[int, int], int], staleness: Staleness
) -> None:
    trainers, parts = (len(set(of)) for of in zip(*read_at, strict=True))
    each = ledger(trainers, parts=parts, version=5)
    for (trainer, part), version in read_at.items():
        each.enter(Ticket(trainer, 5, 5, part), "", version, 0.0)
    assert each.begin_update()
    assert each.end_update() == staleness
