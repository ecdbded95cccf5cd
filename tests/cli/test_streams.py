"""Runs on streams: folders that appear while they train, kills, and another size of the cluster."""

import csv
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.commands import COMMAND_SECONDS, ROOT, Command, eventually, output_of, run, settings, started

from hybrid.checkpoint.checkpoint_folders import list_checkpoints
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from workers.jobs.comparison import Snapshot, stored_tables
from workers.run_folder.run_access import METRICS_FILE, read_records

ROWS = 3000
COMMON = settings(
    data={
        "format": "parquet",
        "path": "log/day=*",
        "stream": "files(lanes = 4, marker = '_SUCCESS', wait_hours = 0.02, until = 'log/day=3')",
        "dense": "price",
        "sparse": ["user", "item"],
        "vocabulary": "grow",
        "weight": "importance",
    },
    embedding={"dim": 4, "optimizer": "adam"},
    train={"batch_size": 100, "dtype": "float64", "log_every_steps": 1},
    checkpoint={"every_steps": 7},
    dense={"device": "cpu"},
)


def write_day(folder: Path, day: int) -> None:
    """Write a day, whose last file completes it; new users come every day.

    The second file has invalid rows, so one trainer has read its lanes before the other.
    """
    rng = np.random.default_rng(day)
    path = folder / f"log/day={day}"
    path.mkdir(parents=True)
    for part in range(3):
        user = rng.integers(50 * day, 50 * day + 100, size=ROWS // 3)
        label = (rng.random(ROWS // 3) < 0.2 + 0.6 * (user % 2)).astype(np.int8)
        label[: 80 * (part == 1)] = 7
        columns = {
            "label": label,
            "price": rng.random(ROWS // 3),
            "user": user,
            "item": [f"i{i}" for i in rng.integers(30, size=ROWS // 3)],
            "importance": rng.integers(3, size=ROWS // 3),
        }
        pq.write_table(pa.table(columns), path / f"part-{part}.parquet")
    (path / "_SUCCESS").touch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streams")
    for day in (1, 2, 3):
        write_day(path, day)
    return path


def importances(folder: Path) -> list[list[int]]:
    """Return the weights of the valid rows of each day."""
    days = (pq.read_table(folder / f"log/day={day}", filters=[("label", "<", 2)]) for day in (1, 2, 3))
    return [day["importance"].to_pylist() for day in days]


def final_state(folder: Path) -> tuple[Snapshot, dict[str, torch.Tensor]]:
    """Return the tables, in the order of keys, and the dense net of the last checkpoint."""
    stored = Checkpoint.open(max(list_checkpoints(folder)))
    tables = stored_tables(stored)
    order = {name.parameter: keys.argsort() for name, keys in tables.items() if name.kind == "keys"}
    rows = {name: each[order[name.parameter]] for name, each in tables.items() if len(each) > 1}
    return rows, dict(stored.tensors("dense.safetensors"))


def is_printed(command: Command, text: str) -> bool:
    return text in command.stdout


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [each for each in read_records(folder / METRICS_FILE) if each["kind"] == kind]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    output_of(["launch", *COMMON, *settings(run={"folder": "whole"})], folder)
    return folder / "whole"


def test_units_are_judged_before_they_train(folder: Path, undisturbed: Path) -> None:
    units = records(undisturbed, "unit")
    assert [unit["unit"] for unit in units] == [f"log/day={day}" for day in (1, 2, 3)]
    assert [unit["step"] for unit in units] == [30, 60, 90]
    with_weight = [sum(map(bool, importance)) for importance in importances(folder)]
    assert [unit["num_samples"] for unit in units] == with_weight
    assert units[0]["auc"] < units[1]["auc"]
    assert 0.8 < units[2]["calibration"] < 1.2
    lines = records(undisturbed, "train")
    assert [line["step"] for line in lines] == [*range(1, 91)]
    assert lines[-1]["user.rows"] == 200
    assert all(0 < line["progressive_log_loss"] < 1 for line in lines)


def test_folder_that_appears_is_read(folder: Path, undisturbed: Path, tmp_path: Path) -> None:
    write_day(tmp_path, 1)
    with started(["launch", *COMMON, *settings(run={"folder": "run"})], tmp_path) as command:
        for day in (2, 3):
            waiting = f"waiting for the unit after log/day={day - 1}"
            assert eventually(partial(is_printed, command, waiting), COMMAND_SECONDS), command.stdout
            write_day(tmp_path, day)
        assert command.wait().code == 0
    assert_equal(final_state(tmp_path / "run"), final_state(undisturbed), 0)


@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_killed_run_continues_with_the_same_bits(folder: Path, undisturbed: Path, update: str) -> None:
    name = f"killed-{update}"
    more = settings(run={"folder": name}, train={"update": update}, cluster={"workers": 3})
    with started(["launch", *COMMON, *more], folder) as command:
        for role, step in (("trainer 1", 12), ("worker 0", 40)):
            assert eventually(partial(is_printed, command, f"step {step} "), COMMAND_SECONDS)
            command.role(role).kill()
        assert command.wait().code == 0
    assert_equal(final_state(folder / name), final_state(undisturbed), 0)
    assert records(folder / name, "unit")[1]["auc"] == records(undisturbed, "unit")[1]["auc"]


def test_run_continues_at_another_size(folder: Path, undisturbed: Path) -> None:
    with started(["launch", *COMMON, *settings(run={"folder": "resized"})], folder) as command:
        assert eventually(partial(is_printed, command, "step 17 "), COMMAND_SECONDS)
        command.process.send_signal(signal.SIGINT)
        assert command.wait().code == 130
    output_of(["launch", "--resume", "resized", *settings(cluster={"trainers": 3, "workers": 1})], folder)
    assert_equal(final_state(folder / "resized"), final_state(undisturbed), 1e-9)


def assert_equal(
    actual: tuple[Snapshot, dict[str, torch.Tensor]],
    expected: tuple[Snapshot, dict[str, torch.Tensor]],
    tolerance: float,
) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


def test_stream_scales_numbers_as_its_initial_run_does(undisturbed: Path, tmp_path: Path) -> None:
    write_day(tmp_path, 3)
    more = settings(run={"folder": "run"}, train={"initial": undisturbed})
    printed = output_of(["launch", *COMMON, *more], tmp_path)
    assert f"values with a row in {undisturbed}" in printed
    scaling = [
        json.loads((max(list_checkpoints(run)) / "features.json").read_text())["dense"]
        for run in (undisturbed, tmp_path / "run")
    ]
    assert scaling[0] == scaling[1]
    assert scaling[0][0]["scale"] != 1


def test_stream_is_that_of_one_process(folder: Path) -> None:
    more = settings(cluster={"trainers": 3}, train={"update": "lookahead"})
    printed = output_of(["compare", "--steps", 70, *COMMON, *more], folder)
    assert "equal up to rounding" in printed


def test_file_that_changes_ends_the_resume(folder: Path) -> None:
    (folder / "other/log").mkdir(parents=True)
    write_day(folder / "other", 1)
    here = folder / "other"
    output_of(["launch", *COMMON, *settings(run={"folder": "run"}, train={"max_steps": 9})], here)
    file = here / "log/day=1/part-1.parquet"
    rows = pq.read_table(file)
    pq.write_table(rows.take(pa.array(range(len(rows))[::-1])), file)
    ended = run(["launch", "--resume", "run", *settings(train={"max_steps": 20})], here)
    assert ended.code == 1
    assert str(file.relative_to(here)) in ended.stderr
    file.unlink()
    ended = run(["launch", "--resume", "run", *settings(train={"max_steps": 20})], here)
    assert ended.code == 1
    assert str(file.relative_to(here)) in ended.stderr


def test_unit_that_never_completes_is_an_error(folder: Path, tmp_path: Path) -> None:
    write_day(tmp_path, 1)
    stream = "files(marker = '_SUCCESS', until = 'log/day=9')"
    ended = run(["launch", *COMMON, *settings(data={"stream": stream})], tmp_path)
    assert ended.code == 1
    assert "log/day=9" in ended.stderr
    assert "data.stream" in ended.stderr


@pytest.mark.long
def test_example_trains_while_days_arrive(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/stream_days.py"), str(tmp_path / "days"), "--rows=60000"]
    subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=3 * COMMAND_SECONDS
    )
    with (tmp_path / "days/auc.csv").open() as file:
        days = [*csv.DictReader(file)]
    assert [day["day"] for day in days] == ["day=01", "day=02", "day=03"]
    assert 0.6 < float(days[0]["auc"]) < float(days[2]["auc"]) < float(days[2]["best reachable"])
    last = json.loads((tmp_path / "days/served/current.json").read_text())["step"]
    assert last == records(tmp_path / "days/run", "unit")[2]["step"]
