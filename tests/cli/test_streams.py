"""Runs on streams: folders that appear while they train, kills, and another size of the cluster."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support import commands
from support.checkpoints import start_before
from support.commands import COMMAND_SECONDS, ROOT, by_hand, eventually, output_of, run, settings, started
from support.stopped_runs import saved_steps

import hybrid
from hybrid.checkpoint.checkpoint_folders import list_checkpoints, parse_step, step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.deltas import DeltaChain
from hybrid.loggers.record_file import METRICS_FILE, read_records
from workers.jobs.comparison import Snapshot, TensorName, stored_tables

ROWS, DAY_STEPS = 1500, 5  # of each day
LOOP = """
import os, signal, sys
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
import hybrid

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        growing = {"growing": True, "optimizer": hybrid.Adam(lr=0.01)}
        self.user = hybrid.Embedding(None, 4, ids="user", **growing)
        self.item = hybrid.Embedding(None, 4, ids="item", **growing)
        self.head = nn.Linear(9, 1).double()

    def forward(self, batch):
        columns = self.user(batch["user"]), self.item(batch["item"]), batch["dense"]
        return self.head(torch.cat(columns, 1)).squeeze(1)

folder, *kills = sys.argv[1:]
cluster = hybrid.connect()
stream = cluster.stream()
model = cluster.distribute(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
cluster.resume(folder, optimizer, every_steps=3)
window = hybrid.ProgressiveMetrics()
for batch in cluster.batches(stream):
    unit = stream.unit
    logits = model(batch)
    window.add(cluster.gather(logits.detach()), cluster.gather(batch["label"]))
    loss = binary_cross_entropy_with_logits(logits, batch["label"].double(), reduction="none")
    cluster.backward(loss, batch["label.weights"])
    optimizer.step()
    if cluster.step % 5 == 0:
        cluster.print(unit, cluster.step, {name: round(each, 9) for name, each in window.metrics().items()})
        window = hybrid.ProgressiveMetrics()
    if cluster.rank == 1 and kills and cluster.step == int(kills[0]):
        os.kill(os.getpid(), signal.SIGKILL)
"""
State = tuple[Snapshot, dict[str, torch.Tensor]]
COMMON = settings(
    data={
        "format": "parquet",
        "path": "log/day=*",
        "stream": "files(lanes = 4, marker = '_SUCCESS', wait_hours = 0.02, until = 'log/day=3', "
        "scaling_momentum = 0.4)",
        "dense": "price",
        "sparse": ["user", "item", "brand"],
        "joins": ['table("items.csv", key = "item")'],
        "vocabulary": "grow",
        "weight": "importance",
    },
    embedding={"dim": 4, "optimizer": "adam"},
    train={"batch_size": 300, "dtype": "float64", "log_every_steps": 1},
    checkpoint={"every_steps": 3},
    dense={"device": "cpu"},
    cluster={"workers": 1},
)


def write_day(folder: Path, day: int) -> None:
    """Write a day, whose last file completes it; new users come every day, and prices rise.

    The second file has invalid rows, so one trainer has read its lanes before the other. A side table has the
    brands of most items.
    """
    rng = np.random.default_rng(day)
    path = folder / f"log/day={day}"
    path.mkdir(parents=True)
    for part in range(3):
        user = rng.integers(50 * day, 50 * day + 100, size=ROWS // 3)
        label = (rng.random(ROWS // 3) < 0.2 + 0.6 * (user % 2)).astype(np.int8)
        label[: 40 * (part == 1)] = 7
        columns = {
            "label": label,
            "price": day * rng.random(ROWS // 3),
            "user": user,
            "item": [f"i{i}" for i in rng.integers(30, size=ROWS // 3)],
            "importance": rng.integers(3, size=ROWS // 3),
        }
        pq.write_table(pa.table(columns), path / f"part-{part}.parquet")
    (folder / "items.csv").write_text("item,brand\n" + "".join(f"i{i},b{i % 4}\n" for i in range(25)))
    (path / "_SUCCESS").touch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streams")
    for day in (1, 2, 3):
        write_day(path, day)
    return path


def final_state(folder: Path) -> State:
    """Return the tables, in the order of keys, and the dense net of the last checkpoint."""
    stored = Checkpoint.open(max(list_checkpoints(folder)))
    tables = stored_tables(stored)
    order = {name.parameter: keys.argsort() for name, keys in tables.items() if name.kind == "keys"}
    rows = {name: each[order[name.parameter]] for name, each in tables.items() if len(each) > 1}
    return rows, dict(stored.tensors("dense.safetensors"))


def has_written(folder: Path, step: int) -> bool:
    """Return whether the last checkpoint, and the last delta that is listed, are of a step."""
    chain = DeltaChain.read(folder)
    return (chain is not None and chain.last.step) == max(saved_steps(folder), default=0) == step


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [each for each in read_records(folder / METRICS_FILE) if each["kind"] == kind]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    more = settings(run={"folder": "whole"}, checkpoint={"keep_last": 9})
    output_of(["launch", *COMMON, *more], folder)
    return folder / "whole"


def test_units_are_judged_before_they_train(folder: Path, uninterrupted: Path) -> None:
    units = records(uninterrupted, "unit")
    assert [unit["unit"] for unit in units] == [f"log/day={day}" for day in (1, 2, 3)]
    assert [unit["step"] for unit in units] == [DAY_STEPS, 2 * DAY_STEPS, 3 * DAY_STEPS]
    filters = [("label", "<", 2), ("importance", ">", 0)]
    with_weight = [len(pq.read_table(folder / f"log/day={day}", filters=filters)) for day in (1, 2, 3)]
    assert [unit["num_samples"] for unit in units] == with_weight
    assert units[0]["auc"] < units[1]["auc"]
    assert 0.8 < units[2]["calibration"] < 1.2
    lines = records(uninterrupted, "train")
    assert [line["step"] for line in lines] == [*range(1, 3 * DAY_STEPS + 1)]
    assert (lines[-1]["user.rows"], lines[-1]["brand.rows"]) == (200, 5)  # and the items without a brand
    assert all(0 < line["progressive_log_loss"] < 1 for line in lines)


def test_folder_that_appears_is_read(folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    write_day(tmp_path, 1)
    checkpoint = {"every_steps": 0, "every_minutes": 0.02, "deltas": "every(seconds = 1)"}
    more = settings(run={"folder": "run"}, checkpoint=checkpoint)
    with started(["launch", *COMMON, *more], tmp_path) as command:
        command.await_text("waiting for rows after log/day=1")
        # The last step of the day is written while the run waits.
        assert eventually(lambda: has_written(tmp_path / "run", DAY_STEPS))
        write_day(tmp_path, 2)
        command.await_text("waiting for rows after log/day=2")
        command.process.send_signal(signal.SIGTERM)
        assert command.wait().code == 128 + signal.SIGTERM
        assert f"\nstopping after step {2 * DAY_STEPS};" in command.stdout
    write_day(tmp_path, 3)
    output_of(["launch", "--resume", "run"], tmp_path)
    assert "--resume" in output_of(["launch", *COMMON, *more, "--resume", "auto"], tmp_path)
    written = [each["step"] for each in records(tmp_path / "run", "checkpoint")]
    assert written == sorted({*written})
    assert_equal(final_state(tmp_path / "run"), final_state(uninterrupted), 0)


@pytest.mark.parametrize("update", [pytest.param("sync", marks=pytest.mark.long), "lookahead"])
def test_killed_run_continues_with_the_same_bits(folder: Path, uninterrupted: Path, update: str) -> None:
    name = f"killed-{update}"
    more = settings(run={"folder": name}, train={"update": update}, cluster={"workers": 2})
    with started(["launch", *COMMON, *more], folder) as command:
        command.await_text("step 8 ")
        command.role("trainer 1").kill()
        assert command.wait().code == 0
    assert_equal(final_state(folder / name), final_state(uninterrupted), 0)
    assert records(folder / name, "unit")[1]["auc"] == records(uninterrupted, "unit")[1]["auc"]


def copy_until(step: int, run_folder: Path, copy: Path) -> None:
    """Copy a run without its result and its checkpoints after a step."""
    shutil.copytree(run_folder, copy)
    (copy / "result.json").unlink()
    for checkpoint in list_checkpoints(copy):
        if parse_step(checkpoint) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.long
def test_run_continues_at_another_size(folder: Path, uninterrupted: Path) -> None:
    copy_until(DAY_STEPS + 1, uninterrupted, folder / "resized")
    sizes = settings(cluster={"trainers": 1, "workers": 2})
    printed = output_of(["launch", "--resume", "resized", *sizes], folder)
    assert f"resuming from step {DAY_STEPS + 1}: " in printed
    assert_equal(final_state(folder / "resized"), final_state(uninterrupted), 1e-9)


def assert_equal(actual: State, expected: State, tolerance: float) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


def test_stream_scales_numbers_as_its_initial_run_does(uninterrupted: Path, tmp_path: Path) -> None:
    write_day(tmp_path, 3)
    stream = {"stream": "files(lanes = 4, until = 'log/day=3')"}
    more = settings(run={"folder": "run"}, train={"initial": uninterrupted}, data=stream)
    # The trainer has another working directory than the master, whose paths are relative.
    roles, more = [["master"], commands.TRAINER, commands.WORKER], [*COMMON, *commands.ONE_EACH, *more]
    with by_hand(roles, more, tmp_path) as (master, *_):
        assert f"values with a row in {uninterrupted}" in master.wait().stdout
    scaling = [
        json.loads((max(list_checkpoints(run)) / "features.json").read_text())["dense"]
        for run in (uninterrupted, tmp_path / "run")
    ]
    assert scaling[0] == scaling[1]
    assert scaling[0][0]["scale"] != 1


def test_served_model_scales_as_the_last_unit_did(folder: Path) -> None:
    """The rows and nets hardly change, so the last unit tells the predictions of the model at the end."""
    rates = {"learning_rate": 1e-30}
    checkpoint = {"every_steps": 0, "every_minutes": 0, "keep_last": 99, "deltas": "every(2, seconds = 0)"}
    more = settings(run={"folder": "served"}, checkpoint=checkpoint, embedding=rates, dense=rates)
    output_of(["launch", *COMMON, *commands.ONE_EACH, *more], folder)
    run_folder, raw = folder / "served", {"price": [1.0], "user": [1], "item": ["i1"], "brand": ["b1"]}
    output = run(["evaluate", "served", "--input", "log/day=3", "--json"], folder).stdout
    (last,) = (unit for unit in records(run_folder, "unit") if unit["unit"] == "log/day=3")
    assert json.loads(output)["metrics"]["log_loss"] == pytest.approx(last["log_loss"], rel=1e-6)
    final = hybrid.load(run_folder).encode(raw)["dense"]
    first = start_before(run_folder, min(saved_steps(run_folder)))
    assert hybrid.load(step_folder(run_folder, first.base.step)).encode(raw)["dense"] != final
    assert first.deltas
    (model,) = hybrid.follow(run_folder)
    assert model.encode(raw)["dense"] == final
    start_before(run_folder, first.base.step)
    output_of(["export", "served", "--output", "exported", "--follow", "--format", "tables"], folder)
    assert hybrid.load(folder / "exported").encode(raw)["dense"] == final
    line = commands.refusal("export", run_folder, "--output", "/proc/exported", "--follow", "--format=tables")
    assert "/proc/exported: cannot be written: " in line


def test_stream_is_that_of_one_process(folder: Path) -> None:
    more = settings(cluster={"trainers": 3}, train={"update": "lookahead"})
    printed = output_of(["compare", "--steps", DAY_STEPS + 1, *COMMON, *more], folder)
    assert "equal up to rounding" in printed


def test_file_that_changes_ends_the_resume(folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    copy_until(DAY_STEPS - 1, uninterrupted, folder / "changed")
    file = folder / "log/day=1/part-1.parquet"
    fewer = pq.read_table(original := file.rename(tmp_path / "original")).slice(9)
    write, name = partial(pq.write_table, fewer, file), str(file.relative_to(folder))
    for change, day, text in (write, "3", "data.path = "), (write, "*", name), (file.unlink, "*", name):
        change()
        more = [*commands.ONE_EACH, *settings(data={"path": f"log/day={day}"})]
        ended = run(["launch", "--resume", "changed", *more], folder)
        assert (ended.code, "start a new run with train.initial" in ended.stderr) == (1, file.exists())
        assert text in ended.stderr
    original.rename(file)


# With DAY_STEPS, the last step is stored before the unit ends.
@pytest.mark.parametrize("every_steps", [pytest.param(3, marks=pytest.mark.long), DAY_STEPS])
def test_unit_that_never_completes_is_an_error(every_steps: int, tmp_path: Path) -> None:
    write_day(tmp_path, 1)
    more = settings(data={"stream": "files(marker = '_SUCCESS', until = 'log/day=9')"}, run={"folder": "run"})
    more += [*commands.ONE_EACH, *settings(checkpoint={"every_steps": every_steps})]
    ended = run(["launch", *COMMON, *more], tmp_path)
    assert ended.code == 1
    assert "log/day=9: the unit after log/day=1 was not complete within 0 hours" in ended.stderr
    assert max(saved_steps(tmp_path / "run")) == DAY_STEPS
    write_day(tmp_path, 2)
    until = settings(data={"stream": "files(until = 'log/day=2')"})
    output_of(["launch", "--resume", "run", *until], tmp_path)
    assert [line["step"] for line in records(tmp_path / "run", "train")] == [*range(1, 2 * DAY_STEPS + 1)]
    assert [unit["step"] for unit in records(tmp_path / "run", "unit")] == [DAY_STEPS, 2 * DAY_STEPS]


def reads(state: State) -> list[list[tuple[int, int]]]:
    """Return how many steps have read each value, and the last of them; custom loops have other keys."""
    kinds = ("counts", "last_steps")
    columns = ([state[0][TensorName(f"table {name}", kind)] for kind in kinds] for name in ("user", "item"))
    return [sorted(torch.stack(pair, 1).tolist()) for pair in columns]


def test_custom_loop_reads_the_rows_of_a_configured_run(folder: Path, uninterrupted: Path) -> None:
    (folder / "train.py").write_text(LOOP)
    sizes = settings(cluster={"trainers": 2, "workers": 1})

    def loop(name: str, more: Sequence[str] = ()) -> list[str]:
        ended = run(["run", "train.py", *COMMON, *sizes, *more, "--", name], folder)
        assert (ended.code, ended.stderr) == (0, "")
        return [line for line in ended.stdout.splitlines() if line.startswith("log/day=")]

    lines = loop("loop")
    assert [line.split()[:2] for line in lines] == [[f"log/day={d}", f"{DAY_STEPS * d}"] for d in (1, 2, 3)]
    whole = final_state(folder / "loop")
    assert reads(whole) == reads(final_state(uninterrupted))
    more = settings(cluster={"max_restarts": 0})
    killed = run(["run", "train.py", *COMMON, *sizes, *more, "--", "loop-resized", 8], folder)
    assert (killed.code, killed.stderr.count("SIGKILL")) == (75, 1)
    assert loop("loop-resized", more=settings(cluster={"trainers": 1, "workers": 2}))[-1] == lines[-1]
    assert_equal(final_state(folder / "loop-resized"), whole, 1e-9)


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
