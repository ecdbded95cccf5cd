"""Preparing with this project and with pyarrow."""

import json
from pathlib import Path

import pytest
from benchmark.__main__ import main
from benchmark.preparing import PYARROW

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
