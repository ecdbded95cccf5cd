"""The shipped configurations: each trains a good model, on real data if they are present."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
from support.commands import ROOT, output_of, result_of, run, settings

DATA = ROOT.parent / "shared" / "data"
ADULT = {"path": DATA / "adult" / "adult.data.gz", "test_path": DATA / "adult" / "adult.test.gz"}
CRITEO = {"path": DATA / "criteo" / "train.csv.gz", "test_path": DATA / "criteo" / "test.csv"}


def needs(files: dict[str, Path]) -> pytest.MarkDecorator:
    missing = [str(path) for path in files.values() if not path.exists()]
    return pytest.mark.skipif(bool(missing), reason=f"real data not here: {', '.join(missing)}")


def launch(name: str, tmp_path: Path, **sections: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Run ``configs/NAME.toml`` with some keys replaced; return its output and its result."""
    overrides = settings(run={"folder": tmp_path / "run"}, **sections)
    printed = output_of(["launch", "--config", ROOT / "configs" / f"{name}.toml", *overrides], tmp_path)
    return printed, result_of(tmp_path / "run")


@pytest.mark.long
@needs(CRITEO)
def test_criteo_sample_reaches_an_auc(tmp_path: Path) -> None:
    _, result = launch("criteo", tmp_path, data=dict(CRITEO))
    assert result["num_samples"] == 391
    assert result["auc"] > 0.65


@pytest.mark.long
@needs(ADULT)
def test_adult_reaches_the_published_accuracy(tmp_path: Path) -> None:
    # Two of the five epochs of the configuration suffice.
    printed, result = launch("adult", tmp_path, data=dict(ADULT), train={"epochs": 2})
    assert (result["num_samples"], result["bad_rows"]) == (16_281, 1)
    assert "adult.test.gz:1: " in printed
    assert result["auc"] >= 0.90


def write_log(folder: Path, *options: str) -> None:
    """Write a log that drifts, as ``python examples/drifting_log.py`` does."""
    with mock.patch.object(sys, "argv", ["", str(folder), *options]):
        runpy.run_path(str(ROOT / "examples/drifting_log.py"), run_name="__main__")


def test_history_has_the_last_items_that_the_user_liked_before(tmp_path: Path) -> None:
    write_log(tmp_path / "log", "--days=1", "--rows=200", "--users=4", "--items=9", "--history=3")
    rows = pq.read_table(tmp_path / "log/day=01/part-0.parquet").to_pylist()
    for number, row in enumerate(rows):
        same_user = [each for each in rows[:number] if each["user"] == row["user"]]
        liked = [each["item"] for each in same_user if each["event"] in ("like", "undislike")]
        assert row["liked"] == liked[-3:]
        assert row["hour"] == row["timestamp"] // 3600 % 24


@pytest.mark.long
def test_dlrmv4_trains_on_days_in_the_order_of_time(tmp_path: Path) -> None:
    write_log(tmp_path / "log", "--days=2", "--rows=64", "--users=2", "--history=4096")
    launch("dlrmv4", tmp_path)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    units = [(each["unit"], each["step"], each["num_samples"]) for each in records if each["kind"] == "unit"]
    assert units == [("log/day=01", 2, 64), ("log/day=02", 4, 64)]
    tables = result_of(tmp_path / "run")["tables"]
    assert sum(table["rows"] for table in tables.values()) == 293_050
    assert len(tables) == 11
    assert all(table["dim"] == 64 for table in tables.values())


def test_full_size_of_dlrmv4_is_planned_as_in_its_file(tmp_path: Path) -> None:
    """A shorter log suffices for the memory of workers."""
    write_log(tmp_path / "long", "--days=1", "--rows=200", "--users=1", "--history=4096")
    comment = (ROOT / "configs/dlrmv4.toml").read_text(encoding="utf-8")
    *_, sed, plan = re.findall(r"^#     (\S.*?[^\\])$", comment, re.MULTILINE | re.DOTALL)
    subprocess.run(sed.replace("configs", f"{ROOT}/configs"), shell=True, cwd=tmp_path, check=True)
    planned = json.loads(run([*shlex.split(plan.replace("\\\n#", ""))[1:], "--json"], tmp_path).stdout)
    rows = sum(table["rows"] for table in planned["tables"].values())
    assert rows == 293_050_000
    assert sum(table["bytes"] for table in planned["tables"].values()) == rows * (512 * 4 + 4)
    (stated,) = re.findall(r"a worker needs (\d+) GiB", comment)
    copies = 2 * rows * (512 * 4 + 4) / 8
    assert copies < planned["worker_bytes"] < int(stated) * 2**30 < 2 * copies
