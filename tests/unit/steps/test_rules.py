"""How gradients become updates, and what workers measure of them."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid.config import RunConfig, TrainSection
from hybrid.steps.rules import Staleness, UpdateRules
from hybrid.steps.schedule import Schedule


@pytest.mark.parametrize(
    ("train", "decided", "check_finite"),
    [
        ({}, False, True),
        ({"clip_norm": 1.0}, True, True),
        ({"non_finite": "skip"}, True, False),
        ({"clip_norm": 1.0, "non_finite": "skip"}, True, False),
    ],
)
def test_steps_that_may_be_clipped_or_skipped_are_decided(
    train: dict[str, Any], decided: bool, check_finite: bool
) -> None:
    rules = UpdateRules.of(RunConfig(train=TrainSection(**train)), Schedule())
    assert (rules.decided, rules.check_finite, rules.clip_norm) == (
        decided,
        check_finite,
        train.get("clip_norm"),
    )


class TestStaleness:
    def test_parts_add_up(self) -> None:
        whole = Staleness(2, 3, 2) + Staleness(1, 4, 4) + Staleness()
        assert whole == Staleness(3, 7, 4)
        assert whole.mean == pytest.approx(7 / 3)
        assert Staleness().mean == 0.0
