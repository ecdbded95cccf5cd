"""docs/failures.md is what the tests say, and says all."""

from __future__ import annotations

import ast
from itertools import product

import pytest
from support.failure_plans import HOWS, PLANS, SHORT_PLANS, STARVED_PLANS
from support.failure_table import CASES, ROW_TEST, ROWS_FILE, TESTS, Case, describe

WAYS = {"SIGKILL", "SIGSTOP", "ValueError", "MemoryError"}
PHASES = {"start", "step", "evaluation", "checkpoint", "shutdown"}
ROLES = {"master", "trainer", "worker"}


def has_test(file: str, name: str) -> bool:
    module = ast.parse((TESTS / file).read_text())
    return name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


def test_the_page_is_what_the_tests_say() -> None:
    page = TESTS.parent / "docs/failures.md"
    assert page.read_text(encoding="utf-8") == describe(), (
        "run PYTHONPATH=tests python -m support.failure_table > docs/failures.md"
    )


def test_every_role_fails_in_every_way_at_every_moment() -> None:
    rows = [(row.role.partition(" ")[0], row.how, row.phase) for plan in PLANS for row in plan.rows]
    assert sorted(rows) == sorted(product(ROLES, WAYS, PHASES))
    assert [(plan.kind, plan.how) for plan in PLANS] == [
        (row.role.partition(" ")[0], row.how) for plan in PLANS for row in plan.rows[:1]
    ]
    assert {plan.kind for plan in STARVED_PLANS} == ROLES


def test_every_plan_is_brought_about_by_the_file_that_the_page_names() -> None:
    assert has_test(ROWS_FILE, ROW_TEST)
    for plan in PLANS:
        assert [row for rows in plan.launches for row in rows] == plan.rows


def test_the_short_form_has_every_role_and_every_way() -> None:
    assert {plan.kind for plan in SHORT_PLANS} == ROLES
    assert [plan.how for plan in SHORT_PLANS[:-1]] == list(HOWS)
    assert {*SHORT_PLANS} <= {*PLANS, *STARVED_PLANS}
    assert SHORT_PLANS[-1] in STARVED_PLANS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_test_that_the_page_names_is_there(case: Case) -> None:
    file, _, name = case.test.partition("::")
    assert has_test(file, name)
