"""Roles that are frozen, each at every moment of a run: rows of docs/failures.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.failure_plans import Plan, plans_of
from support.failure_runs import live_through


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("plan", plans_of("cli/test_frozen_roles.py"), ids=str)
def test_the_run_comes_to_its_end(plan: Plan, tiny: list[str], tmp_path: Path) -> None:
    live_through(plan, tiny, tmp_path)
