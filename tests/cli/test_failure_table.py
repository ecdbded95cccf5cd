"""docs/failures.md is what the tests say, and says all."""

import ast
import re
from itertools import product
from pathlib import Path

import pytest
from support.failure_plans import HOWS, PLANS, SHORT_PLANS, STARVED_PLANS
from support.failure_table import describe

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/failures.md").read_text(encoding="utf-8")
# The lines of the last table, but for its head.
CASES = re.findall(r"^\| .*", PAGE.partition("## Everything else")[2].partition("\n## ")[0], re.MULTILINE)[1:]
WAYS = {"SIGKILL", "SIGSTOP", "ValueError", "MemoryError"}
PHASES = {"start", "step", "evaluation", "checkpoint", "shutdown"}
ROLES = {"master", "trainer", "worker"}


def has_test(file: str, name: str) -> bool:
    module = ast.parse((TESTS / file).read_text())
    return name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


def test_the_table_of_roles_is_what_the_tests_say() -> None:
    assert describe() in PAGE, "put in its place what PYTHONPATH=tests python -m support.failure_table prints"


def test_every_role_fails_in_every_way_at_every_moment() -> None:
    rows = [(row.role.partition(" ")[0], row.how, row.phase) for plan in PLANS for row in plan.rows]
    assert sorted(rows) == sorted(product(ROLES, WAYS, PHASES))
    assert [(plan.kind, plan.how) for plan in PLANS] == [
        (row.role.partition(" ")[0], row.how) for plan in PLANS for row in plan.rows[:1]
    ]
    assert {plan.kind for plan in STARVED_PLANS} == ROLES


def test_a_plan_takes_as_many_launches_as_its_rows_need() -> None:
    for plan in PLANS:
        assert [row for rows in plan.launches for row in rows] == plan.rows


def test_the_short_form_has_every_role_and_every_way() -> None:
    assert {plan.kind for plan in SHORT_PLANS} == ROLES
    assert [plan.how for plan in SHORT_PLANS] == list(HOWS)
    assert {*SHORT_PLANS} <= {*PLANS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[2:60])
def test_a_test_that_the_page_names_is_there(case: str) -> None:
    name, file = re.findall(r"\| \[(\w+)\]\(\.\./tests/(\S+)\) \|$", case)[0]
    assert has_test(file, name)


def test_the_page_has_cases_and_the_files_that_it_names_are_there() -> None:
    assert len(CASES) > 20
    assert all((TESTS / file).is_file() for file in re.findall(r"\]\(\.\./tests/([^)]+)\)", PAGE))
