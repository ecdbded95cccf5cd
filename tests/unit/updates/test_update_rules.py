"""Tickets, rules of updates, their ledger, and schedules against torch.optim.lr_scheduler."""

from itertools import islice

import pytest

from hybrid.config import RunConfig, ScheduleSection, TrainSection
from hybrid.errors import ClusterError, ConfigError, DataError
from hybrid.reference.reference_training import learning_rate_factors
from hybrid.updates.ledger import Ledger
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import Schedule, UpdateMode, UpdateRules

STEPS = 60


def factors(section: ScheduleSection, run_steps: int) -> list[float]:
    schedule = Schedule.of(section, run_steps)
    return [schedule.factor(step) for step in range(run_steps)]


def check_against_torch(section: ScheduleSection, run_steps: int) -> None:
    expected = list(islice(learning_rate_factors(section, run_steps), run_steps))
    assert factors(section, run_steps) == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        "constant(warmup_steps = {})",
        "step(decay_every = 7, decay_factor = 0.3, warmup_steps = {})",
        "cosine(final_factor = 0.2, warmup_steps = {})",
        "polynomial(power = 2.5, final_factor = 0.1, warmup_steps = {})",
        "cosine(steps = 120, initial_factor = 0.5, warmup_steps = {})",
    ],
)
@pytest.mark.parametrize("warmup", [0, 1, 13, STEPS - 1])
def test_every_step_equals_torch(kind: str, warmup: int) -> None:
    check_against_torch(ScheduleSection(kind=kind.format(warmup)), STEPS)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, STEPS])
@pytest.mark.parametrize("peak", [0.01, 0.3, 0.999999])
@pytest.mark.parametrize(("initial", "final"), [(0.04, 4e-6), (0.5, 0.0), (0.1, 0.3)])
def test_one_cycle_equals_torch(steps: int, peak: float, initial: float, final: float) -> None:
    section = ScheduleSection(
        kind=f"one_cycle(peak_fraction = {peak}, initial_factor = {initial}, final_factor = {final})"
    )
    check_against_torch(section, steps)


def test_one_cycle_with_its_peak_at_the_first_step() -> None:
    """Torch divides by zero at that step."""
    section = ScheduleSection(kind="one_cycle(peak_fraction = 0.25, final_factor = 0.0)")
    assert factors(section, 4) == pytest.approx([1.0, 0.75, 0.25, 0.0], abs=1e-12)
    check_against_torch(section, 4)


@pytest.mark.parametrize("kind", ["cosine", "polynomial", "one_cycle"])
def test_last_factor_stays_after_the_end(kind: str) -> None:
    section = ScheduleSection(kind=f"{kind}(final_factor = 0.25)")
    schedule = Schedule.of(section, STEPS)
    *_, last = islice(learning_rate_factors(section, STEPS), 2 * STEPS)
    assert [last, schedule.factor(STEPS), schedule.factor(10 * STEPS)] == pytest.approx([0.25] * 3, abs=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "polynomial", "one_cycle"])
def test_run_longer_than_its_schedule_raises_an_error(kind: str) -> None:
    section = ScheduleSection(kind=f"{kind}(steps = 100)")
    assert Schedule.of(section, 100).end == 100
    with pytest.raises(ConfigError) as caught:
        Schedule.of(section, 101)
    assert caught.value.key == "schedule.kind"


@pytest.mark.parametrize("kind", ["cosine", "polynomial"])
@pytest.mark.parametrize(("steps", "end"), [(0, 20), (30, 30)])
def test_warm_up_as_long_as_the_schedule_raises_an_error(kind: str, steps: int, end: int) -> None:
    section, shorter = (
        ScheduleSection(kind=f"{kind}(steps = {steps}, warmup_steps = {warmup})") for warmup in (end, end - 1)
    )
    Schedule.of(shorter, 20)
    with pytest.raises(ConfigError) as caught:
        Schedule.of(section, 20)
    assert caught.value.key == "schedule.kind"


@pytest.mark.parametrize("purpose", Purpose)
def test_ticket_round_trip(purpose: Purpose) -> None:
    ticket = Ticket(3, 5, 4, 1, purpose, 6)
    assert {type(value) for value in ticket.plain} == {int, str}
    assert Ticket.of(ticket.plain) == ticket
    assert Ticket.of(ticket.plain).purpose is purpose


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("non_finite", ["stop", "skip"])
def test_steps_that_may_be_clipped_or_skipped_are_decided(clip_norm: float | None, non_finite: str) -> None:
    config = RunConfig(train=TrainSection(clip_norm=clip_norm, non_finite=non_finite))
    rules = UpdateRules.of(config, Schedule(), config.cluster.trainers)
    assert rules.has_update_guard == (clip_norm is not None or non_finite == "skip")
    assert (rules.clip_norm, rules.check_finite) == (clip_norm, non_finite == "stop")


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
