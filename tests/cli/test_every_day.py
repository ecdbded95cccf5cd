"""The page "How to train every day": two days of a log that drifts, in growing tables."""

import csv
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli.test_cli_configs import write_log
from support.commands import ROOT, code_block, output_of, settings

from hybrid.loggers.record_file import METRICS_FILE, read_records

SECONDS = 100
LOG = "examples/drifting_log.py"
SMALL = settings(train={"batch_size": 200, "log_every_steps": 1}, cluster={"trainers": 1, "workers": 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three days of a log."""
    path = tmp_path_factory.mktemp("every_day")
    write_log(path / "log", "--days=3", "--rows=1000", "--users=100", "--items=60")
    return path


def run_page(folder: Path) -> None:
    """Run the commands of the page."""
    text = code_block("docs/every_day.md", "", "train.initial").replace("\\\n", "")
    text = text.replace("configs/", f"{ROOT}/configs/")
    log, *days = [shlex.split(line) for line in text.splitlines()]
    assert [log[:2], *(day[:2] for day in days)] == [["python", LOG], *[["hybrid", "launch"]] * 2]
    for day in days:
        output_of([*day[1:], *SMALL], folder)


def users(folder: Path, day: int) -> set[str]:
    table = pq.read_table(folder / f"log/day=0{day}/part-0.parquet", columns=["user"])
    return {*table["user"].to_pylist()}


def train_lines(run: Path) -> list[dict[str, float]]:
    return [each for each in read_records(run / METRICS_FILE) if each["kind"] == "train"]


def test_log_drifts_and_its_best_score_is_known(folder: Path) -> None:
    lines = (folder / "log/best_auc.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["day", "1", "2", "3"]
    assert all(0.75 < float(line.partition(",")[2]) < 0.9 for line in lines[1:])
    days = [pq.read_table(folder / f"log/day=0{day}/part-0.parquet") for day in (1, 2)]
    times = [time for day in days for time in day["timestamp"].to_pylist()]
    assert times == sorted(times)


def test_new_users_get_rows_in_the_tables_of_yesterday(folder: Path) -> None:
    run_page(folder)
    first, second = (train_lines(folder / f"runs/day-0{day}") for day in (1, 2))
    old, new = users(folder, 1), users(folder, 2) - users(folder, 1)
    assert new
    assert first[-1]["user.rows"] == len(old)
    assert sum(line["user.admitted"] for line in second) == len(new)
    assert second[-1]["user.rows"] == len(old) + len(new)
    assert second[0]["step"] == 1
    assert second[0]["user.unknown_fraction"] < 0.5 < first[0]["user.unknown_fraction"]


@pytest.mark.long
def test_example_compares_three_ways(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples/train_every_day.py"), str(tmp_path / "days")]
    command += ["--days=2", "--rows=4000"]
    subprocess.run(command, env=environment, check=True, timeout=SECONDS)
    with (tmp_path / "days/auc.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert [*line] == ["day", "frozen", "growing", "prepared", "best reachable"]
    assert all(
        float(line[name]) < float(line["best reachable"]) for name in ("frozen", "growing", "prepared")
    )
    assert (tmp_path / "days/auc.svg").stat().st_size
