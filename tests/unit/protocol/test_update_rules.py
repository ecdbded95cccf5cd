"""How gradients become updates, and what workers measure of them."""

import pytest

from hybrid.config import RunConfig, TrainSection
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.protocol.update_rules import Staleness, UpdateRules


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("non_finite", ["stop", "skip"])
def test_steps_that_may_be_clipped_or_skipped_are_decided(clip_norm: float | None, non_finite: str) -> None:
    config = RunConfig(train=TrainSection(clip_norm=clip_norm, non_finite=non_finite))
    rules = UpdateRules.of(config, Schedule())
    assert rules.decided == (clip_norm is not None or non_finite == "skip")
    assert (rules.clip_norm, rules.check_finite) == (clip_norm, non_finite == "stop")


class TestStaleness:
    def test_losses_of_micro_batches_add_up(self) -> None:
        whole = Staleness(2, 3, 2) + Staleness(1, 4, 4) + Staleness()
        assert whole == Staleness(3, 7, 4)
        assert whole.mean == pytest.approx(7 / 3)
        assert Staleness().mean == 0.0
