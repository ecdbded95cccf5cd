"""Every row of docs/failures.md, brought about; and the page is what the tests say."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from support import faulty_net
from support.commands import run, settings
from support.failure_table import CASES, HEARTBEAT_SECONDS, PLANS, TESTS, Case, Row, describe

SECONDS = 100.0
PHASES = {"start", "step", "evaluation", "checkpoint", "shutdown"}
ROLES = {"master", "trainer", "worker"}


def line_of(row: Row) -> str:
    """What launch says of a row, as a regular expression."""
    if row.phase == "shutdown":
        return rf"hybrid launch: {row.pattern}; the run had finished, nothing is lost"
    lost = r"nothing is lost" if row.phase == "start" else r"(steps \d+ to \d+ are lost|nothing is lost)"
    return rf"hybrid launch: {row.pattern}; {lost}, (going on from step \d+|starting from the beginning)"


@pytest.mark.parametrize("plan", PLANS)
def test_launch_goes_on(plan: str, tiny: list[str], tmp_path: Path) -> None:
    rows = PLANS[plan]
    shutil.copy(faulty_net.__file__, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/faults.json").write_text(json.dumps([row.fault for row in rows]))
    beat = HEARTBEAT_SECONDS if plan == "frozen" else 30  # a busy machine is no frozen one
    overrides = settings(
        run={"folder": "run"},
        dense={"net": "faulty_net:build"},
        checkpoint={"every_steps": 4},
        cluster={"max_restarts": len(rows), "heartbeat_timeout_seconds": beat},
    )
    ended = run(["launch", *tiny, *overrides], tmp_path, SECONDS)
    lines = ended.stderr.splitlines()
    assert len(lines) == len(rows), ended.stderr
    for row, line in zip(rows, lines, strict=True):
        assert re.fullmatch(line_of(row), line), (row, line)
    assert ended.code == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["steps"], result["num_samples"]) == (16, 500)
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if line["kind"] == "train"] == list(range(1, 17))


def test_the_page_is_what_the_tests_say() -> None:
    page = TESTS.parent / "docs/failures.md"
    assert page.read_text(encoding="utf-8") == describe(), (
        "run PYTHONPATH=tests python -m support.failure_table > docs/failures.md"
    )


def test_every_role_is_killed_in_every_phase() -> None:
    rows = [row for plan in PLANS.values() for row in plan]
    assert len({row.fault for row in rows}) == len(rows)
    killed = {(row.role.partition(" ")[0], row.phase) for row in rows if row.how == "SIGKILL"}
    terminated = {(row.role.partition(" ")[0], row.phase) for row in rows if row.how == "SIGTERM"}
    assert killed | terminated == {(role, phase) for role in ROLES for phase in PHASES}
    assert {row.role.partition(" ")[0] for row in rows if row.how == "SIGSTOP"} == ROLES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_test_that_the_page_names_is_there(case: Case) -> None:
    file, _, name = case.test.partition("::")
    module = ast.parse((TESTS / file).read_text())
    assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
