"""What workers measure of their updates."""

from __future__ import annotations

import pytest

from hybrid.steps.rules import Staleness


class TestStaleness:
    def test_parts_add_up(self) -> None:
        whole = Staleness(2, 3, 2) + Staleness(1, 4, 4) + Staleness()
        assert whole == Staleness(3, 7, 4)
        assert whole.mean == pytest.approx(7 / 3)
        assert Staleness().mean == 0.0
