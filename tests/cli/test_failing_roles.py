"""Roles that fail, each in every way and in every phase of a run: the rows of docs/failures.md."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT
from support.failures import (
    HOWS,
    PHASES,
    PLANS,
    ROLES,
    SHORT_PLANS,
    STARVED_PLANS,
    Plan,
    Row,
    live_through,
    shared_server,
)
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


def consequence(row: Row) -> str:
    if row.ends_launch:
        return "ends"
    return {"start": "starts again", "shutdown": "finished"}.get(row.phase, "goes on")


def test_the_page_has_the_table_of_roles() -> None:
    titles = {"ValueError": "exception", "MemoryError": "out of memory"}
    lines = [f"| role | when | {' | '.join(titles.get(how, how) for how in HOWS)} |"]
    lines.append("|---" * (2 + len(HOWS)) + "|")
    for role, phase in product(ROLES, PHASES):
        cells = " | ".join(consequence(Row(role, how, phase)) for how in HOWS)
        lines.append(f"| {role} | {phase} | {cells} |")
    table = "\n".join(lines) + "\n"
    assert table in (ROOT / "docs/failures.md").read_text(encoding="utf-8"), f"put this there:\n{table}"


def test_every_role_fails_in_every_way_in_every_phase() -> None:
    rows = [(row.role.partition(" ")[0], row.how, row.phase) for plan in PLANS for row in plan.rows]
    assert sorted(rows) == sorted(product(ROLES, HOWS, PHASES))
    assert {plan.kind for plan in STARVED_PLANS} == {plan.kind for plan in SHORT_PLANS} == {*ROLES}
    assert [plan.how for plan in SHORT_PLANS] == list(HOWS)
