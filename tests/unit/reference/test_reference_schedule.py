"""Learning rates of the reference against numbers computed by hand."""

from itertools import islice
from typing import Any

import pytest

from hybrid.config import ScheduleSection
from hybrid.reference.reference_training import learning_rate_factors


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"kind": "constant(initial_factor = 0.2, warmup_steps = 4)"}, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]),
        (
            {"kind": "step(decay_every = 2, decay_factor = 0.5, initial_factor = 0.1, warmup_steps = 2)"},
            [0.1, 0.55, 1.0, 1.0, 0.5, 0.5],
        ),
        ({"kind": "cosine(final_factor = 0.2)"}, [1.0, 0.8, 0.4, 0.2, 0.2]),
        ({"kind": "cosine(steps = 2)"}, [1.0, 0.5, 0.0, 0.0]),
        ({"kind": "polynomial(steps = 3, power = 2.0, final_factor = 0.1)"}, [1.0, 0.5, 0.2, 0.1, 0.1]),
        (
            {"kind": f"one_cycle(initial_factor = 0.2, peak_fraction = {2 / 3}, final_factor = 0.4)"},
            [0.2, 1.0, 0.4, 0.4],
        ),
        ({"kind": f"one_cycle(peak_fraction = {1 / 3}, final_factor = 0.0)"}, [1.0, 0.5, 0.0, 0.0]),
    ],
    ids=["warm-up", "step", "cosine", "cosine-ends", "polynomial", "one_cycle", "no-rise"],
)
def test_factors_of_each_schedule(keys: dict[str, Any], expected: list[float]) -> None:
    """In a run of three steps, and past its end."""
    factors = list(islice(learning_rate_factors(ScheduleSection(**keys), 3), len(expected)))
    assert factors == pytest.approx(expected, rel=1e-12, abs=1e-15)
