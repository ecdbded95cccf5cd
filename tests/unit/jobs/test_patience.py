"""When a run ends for want of a better evaluation."""

import math

import pytest

from hybrid.checkpoint.checkpoint_manifest import Best
from workers.jobs.training_job import is_patience_over


@pytest.mark.parametrize(
    ("evaluations", "best", "step", "is_lost"),
    [
        (0, Best("auc", 0.7, 10), 1000, False),
        (2, Best("auc", 0.7, 10), 20, False),
        (2, Best("auc", 0.7, 10), 29, False),
        (2, Best("auc", 0.7, 10), 30, True),
        (2, None, 10, False),
        (2, None, 20, True),
        (1, Best("auc", math.nan, 10), 10, True),
    ],
)
def test_evaluations_are_counted_since_the_best(
    evaluations: int, best: Best | None, step: int, is_lost: bool
) -> None:
    assert is_patience_over(evaluations, 10, best, step) == is_lost
