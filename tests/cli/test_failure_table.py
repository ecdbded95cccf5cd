"""The table of roles in docs/failures.md is what the tests produce, and complete."""

from itertools import product
from pathlib import Path

from support.failure_plans import HOWS, PLANS, SHORT_PLANS, STARVED_PLANS
from support.failure_table import describe

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/failures.md").read_text(encoding="utf-8")
WAYS = {"SIGKILL", "SIGSTOP", "ValueError", "MemoryError"}
PHASES = {"start", "step", "evaluation", "checkpoint", "shutdown"}
ROLES = {"master", "trainer", "worker"}


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
