"""Schedules against torch.optim.lr_scheduler, and the combinations that are refused."""

from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hybrid.config import ScheduleSection
from hybrid.errors import ConfigError
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.reference.reference_schedule import learning_rate_factors

STEPS = 60


def factors(section: ScheduleSection, run_steps: int) -> list[float]:
    schedule = Schedule.of(section, run_steps)
    return [schedule.factor(step) for step in range(run_steps)]


def assert_equal(ours: list[float], theirs: list[float]) -> None:
    assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "constant"},
        {"kind": "step(decay_every = 7, decay_factor = 0.3)"},
        {"kind": "cosine(final_factor = 0.2)"},
        {"kind": "polynomial(power = 2.5, final_factor = 0.1)"},
        {"kind": f"cosine(steps = {2 * STEPS}, initial_factor = 0.5)"},
    ],
    ids=str,
)
@pytest.mark.parametrize("warmup", [0, 1, 13, STEPS - 1])
def test_every_step_equals_torch(keys: dict[str, Any], warmup: int) -> None:
    text = keys["kind"]
    text = f"{text[:-1]}, warmup_steps = {warmup})" if "(" in text else f"{text}(warmup_steps = {warmup})"
    section = ScheduleSection(kind=text)
    assert_equal(factors(section, STEPS), list(islice(learning_rate_factors(section, STEPS), STEPS)))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, STEPS])
@pytest.mark.parametrize("peak", [0.01, 0.3, 0.999999])
@pytest.mark.parametrize(("initial", "final"), [(0.04, 4e-6), (0.5, 0.0), (0.1, 0.3)])
def test_one_cycle_equals_torch(steps: int, peak: float, initial: float, final: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.OneCycleLR(
        optimizer,
        1.0,
        total_steps=steps,
        pct_start=peak,
        cycle_momentum=False,
        div_factor=1 / initial,
        final_div_factor=initial / final if final else float("inf"),
    )
    rates = []
    for _ in range(steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    section = ScheduleSection(
        kind=f"one_cycle(peak_fraction = {peak}, initial_factor = {initial}, final_factor = {final})"
    )
    assert_equal(factors(section, steps), rates)


def test_one_cycle_with_its_peak_at_the_first_step() -> None:
    """There torch divides by zero."""
    section = ScheduleSection(kind="one_cycle(0.25)")
    assert factors(section, 4) == pytest.approx([1.0, 0.75, 0.25, 0.0], abs=1e-12)


def test_default_schedule_is_constant() -> None:
    assert [Schedule().factor(step) for step in (0, 1, 10**9)] == [1.0] * 3
    assert Schedule() == Schedule.of(ScheduleSection(), 0)


@pytest.mark.parametrize("kind", ["cosine", "polynomial", "one_cycle"])
def test_last_factor_stays_after_the_end(kind: str) -> None:
    schedule = Schedule.of(ScheduleSection(kind=f"{kind}(final_factor = 0.25)"), STEPS)
    assert schedule.factor(STEPS) == schedule.factor(10 * STEPS) == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "polynomial", "one_cycle"])
def test_run_longer_than_its_schedule_raises_an_error(kind: str) -> None:
    section = ScheduleSection(kind=f"{kind}(steps = 100)")
    assert Schedule.of(section, 100).end == 100
    with pytest.raises(ConfigError) as caught:
        Schedule.of(section, 101)
    assert caught.value.key == "schedule.kind"


@pytest.mark.parametrize("kind", ["constant", "step"])
def test_schedules_without_an_end_outlast_every_run(kind: str) -> None:
    section = ScheduleSection(kind=f"{kind}(warmup_steps = 10)")
    assert Schedule.of(section, 3).factor(5) == pytest.approx(0.04 + 0.96 / 2)
    assert Schedule.of(section, 1000).factor(10) == 1.0


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
