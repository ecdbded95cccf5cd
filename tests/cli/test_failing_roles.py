"""Every failure of every role in every phase of a run: the rows of docs/failures.md."""

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
def test_run_completes_after_failures(plan: Plan, tiny: list[str], tmp_path: Path) -> None:
    live_through(plan, tiny, tmp_path)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A memory control group with a fork server in it."""
    if own_group() is None:
        pytest.skip("needs memory control groups of version 1, and the right to make one")
    with child_group(), shared_server():
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("plan", parameters(STARVED_PLANS))
def test_run_completes_after_the_kernel_kills_a_role_for_memory(
    plan: Plan, tiny: list[str], tmp_path: Path
) -> None:
    live_through(plan, tiny, tmp_path)


def result_of(row: Row) -> str:
    if row.ends_launch:
        return "ends"
    return {"start": "restarts", "shutdown": "finished"}.get(row.phase, "resumes")


def test_page_has_the_table_of_failures() -> None:
    titles = {"ValueError": "exception", "MemoryError": "out of memory"}
    lines = [f"| role | when | {' | '.join(titles.get(how, how) for how in HOWS)} |"]
    lines.append("|---" * (2 + len(HOWS)) + "|")
    for role, phase in product(ROLES, PHASES):
        cells = " | ".join(result_of(Row(role, how, phase)) for how in HOWS)
        lines.append(f"| {role} | {phase} | {cells} |")
    table = "\n".join(lines) + "\n"
    assert table in (ROOT / "docs/failures.md").read_text(encoding="utf-8"), f"the table should be:\n{table}"
