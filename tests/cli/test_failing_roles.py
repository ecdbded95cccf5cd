"""Roles that fail, each in every way and at every moment of a run: the rows of docs/failures.md."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.failure_plans import PLANS, SHORT_PLANS, STARVED_PLANS, Plan
from support.failure_runs import live_through, shared_server
from support.memory_group import child_group, own_group


def parameters(plans: Sequence[Plan]) -> list[Any]:
    return [
        pytest.param(plan, id=str(plan), marks=() if plan in SHORT_PLANS else pytest.mark.long)
        for plan in plans
    ]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("plan", parameters(PLANS))
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
@pytest.mark.parametrize("plan", parameters(STARVED_PLANS))
def test_the_kernel_ends_a_role_for_want_of_memory(plan: Plan, tiny: list[str], tmp_path: Path) -> None:
    live_through(plan, tiny, tmp_path)
