"""A cluster whose roles are on hosts of their own: it trains, and takes as little as it should."""

import json
from pathlib import Path

import pytest
from benchmark.__main__ import main
from support.namespaces import needs_namespaces


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize("where", [["--hosts"], []], ids=["hosts", "one"])
def test_what_a_cluster_of_three_takes(where: list[str], tmp_path: Path) -> None:
    """With the channels that torch takes by itself, a role of three has 212 files open between hosts."""
    assert main(["wide", "--roles", "3", "--output", str(tmp_path), *where]) == 0
    (taken,) = json.loads((tmp_path / "results.json").read_text())["clusters"]
    assert taken["roles"] == 3
    assert 30 < taken["open_files"] < 80
    assert 15 < taken["threads"] < 30
    assert taken["memory_bytes"] > 100 << 20
    assert 1 < taken["seconds_to_first_step"] < 100
