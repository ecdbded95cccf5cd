"""Preparing beside pyarrow: every system is measured, and what the tables say of it."""

import json
from pathlib import Path

import pytest
from benchmark.__main__ import main
from benchmark.preparing import PYARROW, Cost, account_table, cost_table

OURS = "ours, hashed"


@pytest.mark.long
def test_every_system_prepares_the_rows(tmp_path: Path) -> None:
    assert main(["prepare", "--rows", "3000", "--cores", "1", "--output", str(tmp_path)]) == 0
    costs = {each["system"]: each for each in json.loads((tmp_path / "results.json").read_text())["costs"]}
    assert {"ours, with vocabularies", OURS, PYARROW} <= {*costs}
    for each in costs.values():
        assert each["rows"] == 3000
        assert 0.1 < each["cpu_seconds"] < 100
        assert each["seconds"] >= 0.9 * each["cpu_seconds"]  # one core
    assert costs[OURS]["memory_bytes"] > 20 << 20
    assert costs[OURS]["written_bytes"] > 3000 * 4 * 40
    assert costs[PYARROW]["written_bytes"] < 3000
    assert "3,000 rows, pyarrow" in (tmp_path / "results.md").read_text()


def test_more_cores_than_there_are_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--cores", "100000"]) == 1
    assert "--cores = 100000: must be at most the" in capsys.readouterr().err


def test_medians_and_what_more_rows_would_take() -> None:
    costs = [
        Cost(system, rows, number, 3600.0 * rows / 1000, cpu, 2 << 20, 3 << 20)
        for rows in (500, 1000)
        for number, ours, theirs in ((1, 6.0, 3.0), (2, 9.0, 3.0), (3, 7.2, 2.4))
        for system, cpu in ((OURS, ours), (PYARROW, theirs))
    ]
    of_most = cost_table(costs).rows[2:]
    assert of_most[0] == ("1,000 rows, ours, hashed", "3600.0", "7.2", "7200.00", "2", "3", "3.00")
    assert of_most[1] == ("1,000 rows, pyarrow", "3600.0", "3.0", "3000.00", "2", "3", "1.00")
    account = account_table(costs, 2)
    assert account.title == "By 1,000 rows, more would take"
    assert account.rows[0] == ("45,000,000 rows, ours, hashed", "90.00", "45,000.00", "131.84")
    assert account.rows[3][1] == f"{3.0 / 3600 * 4_400_000:,.2f}"
