"""A checkpoint and its deltas have exactly the values of a later checkpoint; followers see every change."""

import dataclasses
import json
import runpy
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.checkpoints import flip_a_bit, start_before
from support.choices import choices_config
from support.cluster import Clusters, small_config
from support.commands import ROOT
from support.stopped_runs import InterruptedRunError, View, saved_steps, train
from torch import Tensor

import hybrid
from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.checkpoint.deltas import DeltaChain, open_delta, read_changes
from hybrid.config import ColumnSection, RunConfig, TableSection
from hybrid.errors import CheckpointError
from hybrid.inference import table_export
from hybrid.inference.trained_module import TrainedModule
from hybrid.loggers.record_file import METRICS_FILE, read_records
from workers.cli import main
from workers.cli.model_commands import export_followed, export_run
from workers.cluster_task import TrainTask
from workers.controller.stream_session import StreamSession
from workers.jobs.training_job import Training
from workers.rendezvous.bootstrap import JoinedCluster

TOTAL = 14
Values = dict[str, Tensor]


def write_visits(path: Path) -> None:
    """Write visits of rare users, whose keys a growing table loses, and of shops that few steps read."""
    rows = ["clicked,price,user,shop,tag"]
    rows += [f"{i % 3 // 2},{i % 7}.5,u{i * i % 811},s{i % 400},t{i % 5}|t{i % 9}" for i in range(1600)]
    path.write_text("\n".join(rows) + "\n")


def visits_config(path: Path, update: str, **checkpoint: Any) -> RunConfig:
    """A growing table, a split table whose steps change all rows, and a remote net."""
    write_visits(path)
    columns = {"label": "clicked", "dense": ("price",), "sparse": ("user", "shop", "tag")}
    remote = {"remote_mlp": (8,)} if update == "sync" else {}
    return small_config(
        data={"format": "csv", "path": (str(path),), "multi_hot_separator": "|", **columns},
        embedding={
            "optimizer": "adagrad",
            "dim": 4,
            "dtype": "bfloat16" if update == "lookahead" else "train",
        },
        train={"epochs": 9, "max_steps": TOTAL, "log_every_steps": 5, "batch_size": 64, "update": update},
        dense={"optimizer": "Adam", "learning_rate": 0.01, **remote},
        checkpoint={"deltas": "every(steps = 1, seconds = 0)", **checkpoint},
    ).replace(
        columns={"user": ColumnSection(vocabulary="grow(evict_after = 2)")},
        tables={
            "shop": TableSection(placement="row", optimizer="adam(all_rows = true)"),
            "tag": TableSection(placement="table"),
        },
    )


def values_of(model: TrainedModule) -> Values:
    """Return copies of the tables, of the keys of growing tables, and of the nets of a model."""
    found = {f"{name} rows": model.rows(name) for name in model.table_names}
    found |= {f"{name} keys": model.keys(name) for name in model.growing_tables}
    found |= {name: each for name, each in model.state_dict().items() if "net" in name.partition(".")[0]}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_equal(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def loaded(run: Path, step: int) -> Values:
    return values_of(hybrid.load(step_folder(run, step)))


UPDATES = [("sync", 1), ("lookahead", 2)]  # and numbers of workers


@pytest.fixture(scope="module", params=UPDATES, ids=["sync", "lookahead"])
def followed(
    request: pytest.FixtureRequest, clusters: Clusters, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[tuple[int, Values]]]:
    """A run with checkpoints of the first and the last step, and the models that a follower has seen."""
    update, workers = request.param
    folder = tmp_path_factory.mktemp(update)
    config = visits_config(folder / "visits.csv", update, keep_last=99, keep_best="none")
    config = config.replace(cluster=dataclasses.replace(config.cluster, workers=workers))
    with ThreadPoolExecutor() as pool:
        seen = pool.submit(see_all, folder / "run")
        assert clusters.get(2, workers).run(train, config, cache, folder / "run") == []
        return folder / "run", seen.result()


def see_all(run: Path) -> list[tuple[int, Values]]:
    return [(model.step, values_of(model)) for model in hybrid.follow(run)]


Followed = tuple[Path, list[tuple[int, Values]]]


def test_a_follower_has_exactly_the_values_of_checkpoints(followed: Followed) -> None:
    run, seen = followed
    assert sorted(saved_steps(run)) == [1, TOTAL]
    assert seen[-1][0] == TOTAL
    for step, values in seen:
        if step in saved_steps(run):
            assert_equal(values, loaded(run, step))


def test_deltas_lead_from_a_checkpoint_to_the_values_of_the_next(followed: Followed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(followed[0], run)
    chain = start_before(run, 1)
    assert len(chain.deltas) > 1
    before, after = loaded(run, 1), loaded(run, TOTAL)
    removed = ~torch.isin(before["user keys"], after["user keys"])
    assert removed.any()
    assert (~torch.isin(after["user keys"], before["user keys"])).any()
    last = read_changes(open_delta(run, chain.last), "user", None, 4)
    assert 0 < sum(len(each.rows) for each in last) < len(after["user keys"])
    (model,) = hybrid.follow(run)
    assert model.step == TOTAL
    assert_equal(values_of(model), after)
    read: Callable[[Path], tuple[int, Any, Any]] = runpy.run_path(str(ROOT / "examples/apply_deltas.py"))[
        "read_newest"
    ]
    step, tables, dense = read(run)
    assert step == TOTAL
    assert {*tables["user"]} == {*after["user keys"].tolist()}
    for table, rows in tables.items():
        keys = after["user keys"].tolist() if table == "user" else range(len(rows))
        assert np.array_equal([rows[key] for key in keys], after[f"{table} rows"].float().numpy())
    assert dense.keys() == {name.partition(".")[2] for name in after if name.startswith("net.")}
    assert all(np.array_equal(array, after[f"net.{name}"].numpy()) for name, array in dense.items())


def test_deltas_of_rare_changes_are_smaller_than_tables(followed: Followed) -> None:
    records = [json.loads(line) for line in (followed[0] / "metrics.jsonl").read_text().splitlines()]
    sizes = {kind: [r["bytes"] for r in records if r["kind"] == kind] for kind in ("delta", "checkpoint")}
    assert max(sizes["delta"]) < min(sizes["checkpoint"][1:])


@pytest.mark.parametrize("damage", ["file", "parent", "other", "missing"])
def test_a_damaged_delta_is_refused(followed: Followed, tmp_path: Path, damage: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(followed[0], run)
    chain = start_before(run, 1)
    folder = run / f"deltas/step-{chain.last.step:08d}"
    if damage == "file":
        flip_a_bit(next(folder.glob("tables/user*")))
    elif damage == "parent":
        last = dataclasses.replace(chain.last, parent=64 * "0")
        dataclasses.replace(chain, deltas=(*chain.deltas[:-1], last)).write(run)
    else:
        shutil.rmtree(folder)
    if damage == "other":
        shutil.copytree(run / f"deltas/step-{chain.deltas[-2].step:08d}", folder)
    with pytest.raises(CheckpointError, match="current.json" if damage == "parent" else folder.name):
        list(hybrid.follow(run))


@pytest.mark.parametrize("followed", UPDATES[:1], indirect=True, scope="module")
def test_a_follower_notices_that_a_killed_run_has_resumed(
    followed: Followed, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = visits_config(tmp_path / "visits.csv", "sync", every_steps=6, keep_last=99, keep_best="none")
    with ThreadPoolExecutor() as pool:
        seen = pool.submit(see_all, run)
        clusters.get(2, 2).run(train, job, cache, run, last_step=10, saved_step=6)
        before = DeltaChain.read(run)
        one = job.replace(cluster=dataclasses.replace(job.cluster, workers=1))
        notes = clusters.get(2, 1).run(train, one, cache, run, True)
        models = seen.result()
    after = DeltaChain.read(run)
    assert before is not None
    assert after is not None
    assert after.after(before.last.identity) is None
    assert notes == [f"resuming from step 6: {step_folder(run, 6)}"]
    listed = {f"step-{delta.step:08d}" for delta in after.deltas}
    assert {path.name for path in (run / "deltas").iterdir()} == {"current.json", *listed}
    assert models[-1][0] == TOTAL
    assert_equal(models[-1][1], loaded(followed[0], TOTAL))
    for step, values in models:
        if step in saved_steps(run):
            assert_equal(values, loaded(run, step))


@pytest.mark.parametrize(
    ("followed", "first"), [*zip(UPDATES, (1, TOTAL), strict=True)], indirect=["followed"], scope="module"
)
def test_export_follows_a_run(
    followed: Followed,
    tmp_path: Path,
    first: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_export, "SHARD_BYTES", 512)
    run, served = tmp_path / "run", tmp_path / "served"
    shutil.copytree(followed[0], run)
    if first == 1:
        start_before(run, first)
    arguments = ["export", str(run), "--output", str(served), "--format", "tables"]
    for _ in range(2):  # the second replaces what an interrupted command has left
        main([*arguments, "--follow"])
        current = json.loads((served / "current.json").read_text())
        assert current == {"folder": f"step-{TOTAL:08d}", "step": TOTAL}
        assert f"step {TOTAL}" in capsys.readouterr().out
    main([*arguments[:2], *["--output", str(tmp_path / "once")], *arguments[4:]])
    assert_equal(values_of(hybrid.load(tmp_path / "once")), loaded(run, TOTAL))
    for folder in (served / current["folder"], served):
        assert_equal(values_of(hybrid.load(folder)), loaded(run, TOTAL))
    (served / "current.json").write_text('{"folder": "../run"}')
    with pytest.raises(CheckpointError, match=r"current\.json"):
        hybrid.load(served)
    with pytest.raises(SystemExit):
        main([*arguments, "--follow", "--dtype", "bfloat16"])


def test_followed_items_are_those_of_the_newest_model(
    clusters: Clusters, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, deltas = tmp_path / "run", {"deltas": "every(steps = 1, seconds = 0)", "keep_last": 99}
    with ThreadPoolExecutor() as pool:
        exported = pool.submit(export_followed, run, tmp_path / "served", ["items"])
        clusters.get(2, 2).run(train, choices_config(tmp_path, checkpoint=deltas), cache, run)
        exported.result()
    assert capsys.readouterr().out.startswith(f"waiting for a run with checkpoint.deltas in {run}\n")
    start_before(run, 1)  # in case the export began late
    export_followed(run, tmp_path / "served", ["items"])
    export_run(step_folder(run, max(saved_steps(run))), tmp_path / "once", ["items"], None)
    served = json.loads((tmp_path / "served/current.json").read_text())["folder"]
    found = [pq.read_table(tmp_path / name / "items.parquet") for name in (f"served/{served}", "once")]
    assert found[0].equals(found[1])


def train_stream(cluster: JoinedCluster, config: RunConfig, run: Path, last: int = 0, saved: int = 0) -> None:
    """Train on a stream, or resume the run if it exists, as far as :class:`View` allows."""
    sessions: list[StreamSession] = []

    def make(*args: Any) -> StreamSession:
        sessions.append(StreamSession(*args))
        return sessions[-1]

    job = Training(config, TrainTask(run, run.exists(), time.time()))
    with View(run, last, saved) as view, patch("workers.controller.stream_session.StreamSession", make):
        try:
            job.run(cluster.topology, Path, view)
        except InterruptedRunError:
            with closing(sessions[-1]):
                pass


def write_days(folder: Path) -> list[float]:
    """Write two days of three files, whose rows are nearly in order; return the last time of each step."""
    rng, last = np.random.default_rng(5), []
    for day in range(2):
        (folder / f"day={day}").mkdir(parents=True)
        files = []
        for part in range(3):  # a lane each, of which a step has 20 rows
            times = 1e9 + 1000 * day + 7 * np.arange(200) // 3 + rng.exponential(9, size=200).round(2)
            label = np.where(np.arange(200) < 50 * (part == 1), 7, times // 1 % 2)
            rows = pa.table({"label": label, "user": times // 1 % 99, "price": times % 7, "at": times})
            pq.write_table(rows, folder / f"day={day}/{part}.parquet")
            valid = times[label < 7]  # the lane with fewer valid rows ends before the others
            files.append(np.append(valid, np.full(200 - len(valid), -np.inf)))
        last += np.array(files).reshape(3, -1, 20).max((0, 2)).tolist()
    return last


def test_event_time_writes_deltas_after_the_same_steps(clusters: Clusters, tmp_path: Path) -> None:
    """Also with other numbers of trainers, while a checkpoint is written, and after a kill."""
    log = tmp_path / "log"
    largest = np.maximum.accumulate(write_days(log))
    assert len(largest) == 20
    expected = {s + 1 for s in range(1, 20) if largest[s] // 90 > largest[s - 1] // 90}
    columns = {"dense": ("price",), "sparse": ("user",), "vocabulary": "grow", "max_invalid_fraction": 0.5}
    stream = {"stream": f"files(lanes = 3, until = '{log / 'day=1'}', time = 'at')", "shuffle": "none"}
    config = small_config(
        data={"format": "parquet", "path": (str(log / "day=*"),), **stream, **columns},
        train={"batch_size": 60, "epochs": 1},
        checkpoint={"deltas": "every(event_seconds = 90, seconds = 0)", "every_steps": 7, "keep_last": 9},
    )
    for trainers, update, stops in ((1, "sync", ()), (2, "lookahead", (8,))):
        run, cluster = tmp_path / f"run-{trainers}", clusters.get(trainers, 1)
        sections = {"cluster": dataclasses.replace(config.cluster, trainers=trainers, workers=1)}
        for stop in (*stops, 1000):  # the only line of progress, so a call takes many steps
            train = dataclasses.replace(config.train, update=update, log_every_steps=stop)
            cluster.run(train_stream, config.replace(train=train, **sections), run, stop, stop // 7 * 7)
        records = read_records(run / METRICS_FILE)
        steps = {k: [r["step"] for r in records if r["kind"] == k] for k in ("delta", "checkpoint")}
        # The first one after each start is a checkpoint.
        assert {*steps["delta"], *steps["checkpoint"]} == expected | {7, 14, 20}
        assert len(steps["checkpoint"]) <= 4 + len(stops)
