"""The reference's learning rates, which torch's schedulers give, against formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

import pytest

from hybrid.config import ScheduleSection
from hybrid.reference.schedule import learning_rate_factors

STEPS = 20


def half_cosine(start: float, stop: float, done: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize(
    ("section", "factor"),
    [
        (ScheduleSection(), lambda step: 1.0),
        (ScheduleSection(warmup_steps=5, initial_factor=0.2), lambda step: min(1.0, 0.2 + 0.8 * step / 5)),
        (
            ScheduleSection(kind="step", decay_every=3, decay_factor=0.5, warmup_steps=2, initial_factor=0.1),
            lambda step: (0.1, 0.55)[step] if step < 2 else 0.5 ** ((step - 2) // 3),
        ),
        (
            ScheduleSection(kind="cosine", warmup_steps=4, final_factor=0.1, initial_factor=1.0),
            lambda step: half_cosine(1, 0.1, min(1, max(0, step - 4) / 16)),
        ),
        (
            ScheduleSection(kind="cosine", steps=10),
            lambda step: half_cosine(1, 0, min(1, step / 10)),
        ),
        (
            ScheduleSection(kind="polynomial", power=2.0, final_factor=0.3, steps=12),
            lambda step: 0.3 + 0.7 * (1 - min(1, step / 12)) ** 2,
        ),
        (
            ScheduleSection(kind="one_cycle", initial_factor=0.25, peak_fraction=0.35, final_factor=0.05),
            lambda step: (
                half_cosine(0.25, 1, step / 6) if step < 6 else half_cosine(1, 0.05, min(1, (step - 6) / 13))
            ),
        ),
        (
            ScheduleSection(kind="one_cycle", peak_fraction=0.05, final_factor=0.0),
            lambda step: half_cosine(1, 0, min(1, step / 19)),
        ),
    ],
    ids=["constant", "warm-up", "step", "cosine", "cosine-ends", "polynomial", "one_cycle", "no-rise"],
)
def test_schedules_follow_their_formulas(section: ScheduleSection, factor: Callable[[int], float]) -> None:
    factors = list(islice(learning_rate_factors(section, STEPS), STEPS + 5))
    assert factors == pytest.approx([factor(step) for step in range(STEPS + 5)], rel=1e-12, abs=1e-15)
