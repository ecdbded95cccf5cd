"""Roles that raise, or run out of memory, each at every moment of a run: rows of docs/failures.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.failure_plans import STARVED_PLANS, Plan, plans_of
from support.failure_runs import live_through, shared_server
from support.memory_group import child_group, own_group


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("plan", plans_of("cli/test_raising_roles.py"), ids=str)
def test_the_run_comes_to_its_end(plan: Plan, tiny: list[str], tmp_path: Path) -> None:
    live_through(plan, tiny, tmp_path)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A memory control group, and a server in it: what it forks before belongs to another."""
    if own_group() is None:
        pytest.skip("needs memory control groups of version 1, and the right to make one")
    with child_group(), shared_server():
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("plan", STARVED_PLANS, ids=str)
def test_the_kernel_ends_a_role_for_want_of_memory(plan: Plan, tiny: list[str], tmp_path: Path) -> None:
    live_through(plan, tiny, tmp_path)
