"""Runs that start with the model of another run; every role is this process."""

import dataclasses
import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from support.cluster import LocalTopology
from support.trained import clicks_config, predicted_columns, write_clicks

from hybrid import transport
from hybrid.checkpoint.checkpoint_folders import Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.data.prepare.preparation import prepare
from hybrid.errors import ConfigError
from hybrid.inference.trained_run import TrainedRun
from hybrid.loggers.record_file import METRICS_FILE, read_records
from workers.cluster_task import CompareTask, TrainTask
from workers.console import TerminalView
from workers.controller.remote_trainer import Trainer
from workers.controller.session import DatasetSession
from workers.exit_codes import ExitCode
from workers.jobs.comparison import Comparison, Snapshot, snapshot
from workers.jobs.training_job import Training

pytestmark = pytest.mark.usefixtures("loopback")

TOPOLOGY = LocalTopology(1, 1)


def day(folder: Path, seed: int, initial: Path | None = None, **sections: Mapping[str, object]) -> RunConfig:
    """Return the configuration of a run on the log of one day, and with the initial model of a run."""
    clicks = write_clicks(folder / f"day-{seed}.csv", 300, seed)
    # Numbers are not scaled: each day has another scale, so that predictions could not be compared.
    data: dict[str, object] = {"path": clicks, "numeric_scaling": "none", "validation": "random(0.2)"}
    defaults: dict[str, Mapping[str, object]] = {
        "cluster": {"trainers": 1, "workers": 1},
        "embedding": {"dim": 4, "optimizer": "adam"},
        "dense": {"learning_rate": 0.01, "device": "cpu", "remote_mlp": [6]},
    }
    train = {"batch_size": 32, "initial": initial or "", **sections.pop("train", {})}
    data |= sections.pop("data", {})
    return clicks_config(folder, data=data, train=train, **{**defaults, **sections})


def opened(config: RunConfig, *, is_new: bool = True) -> closing[DatasetSession]:
    folder = prepare(config, Path(config.data.cache_folder))
    return closing(DatasetSession(TOPOLOGY, config, folder, is_new=is_new))


def state(session: DatasetSession) -> Snapshot:
    net, remote_net = session.blueprint.dense_net(), session.blueprint.remote_net()
    assert remote_net is not None
    names = ([name for name, _ in each.named_parameters()] for each in (net, remote_net))
    return snapshot(session, *names)


def trained(folder: Path, config: RunConfig, steps: int = 3) -> Path:
    """Return a checkpoint after some steps."""
    with opened(config) as session:
        session.train(0, steps)
        return Path(str(session.save(folder, steps)))


@pytest.fixture(scope="module")
def stored(loopback: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run on the first day."""
    folder = tmp_path_factory.mktemp("first")
    return trained(folder / "saved", day(folder, 1))


@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_first_step_equals_the_step_of_a_resumed_run(update: str, stored: Path, tmp_path: Path) -> None:
    """With an unchanged vocabulary, on the same batch; optimizers keep their step counts."""
    train = {"update": update}
    with opened(day(tmp_path, 1, train=train), is_new=False) as session:
        session.load(Checkpoint.open(stored))
        before = state(session)
        session.train(3, 1)
        expected = state(session)
    with opened(day(tmp_path, 1, stored, train=train)) as session:
        start = state(session)
        transport.gather([each.call(Trainer.train, 0, 3, 1, 0) for each in session.trainers])
        actual = state(session)
    assert start.keys() == before.keys()
    assert all(torch.equal(start[name], before[name]) for name in before)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert any(not torch.equal(actual[name], start[name]) for name in start)


def test_predictions_of_known_values_are_the_same(tmp_path: Path) -> None:
    """Whether the vocabularies of columns are built or grow, before and now."""
    kinds = {"user": ("build", "build"), "item": ("build", "grow"), "tags": ("grow", "build")}
    kinds["visitor"] = ("grow", "grow")

    def columns(time: int) -> dict[str, dict[str, object]]:
        sources = {**{name: name for name in kinds}, "visitor": "user"}
        return {
            f"columns.{name}": {"vocabulary": kind[time], "source": [sources[name]]}
            for name, kind in kinds.items()
        }

    sparse = {"sparse": [*kinds]}
    stored = trained(tmp_path / "saved", day(tmp_path, 1, None, data=sparse, **columns(0)), 4)
    with opened(day(tmp_path, 2, stored, data=sparse, **columns(1))) as session:
        session.save(tmp_path / "start", 0)
    vocabularies = [
        [*next(e.values or () for e in TrainedRun.read(run, print).encoder.sparse if e.name == "user")]
        for run in (stored, tmp_path / "start")
    ]
    assert vocabularies[0] != vocabularies[1]
    assert {*vocabularies[0]} == {*vocabularies[1]}
    inputs = write_clicks(tmp_path / "new.csv", 50, seed=3)
    before, now = predicted_columns(stored, inputs), predicted_columns(tmp_path / "start", inputs)
    assert np.array_equal(before["probability"], now["probability"])


def test_another_dense_net_is_refused_in_one_line(stored: Path, tmp_path: Path) -> None:
    dense = {"device": "cpu", "remote_mlp": [6], "bottom_mlp": [8, 4]}
    with (
        pytest.raises(ConfigError, match=r"^train\.initial = .*bottom\.0\.weight") as caught,
        opened(day(tmp_path, 1, stored, dense=dense)),
    ):
        pass
    assert "\n" not in str(caught.value)


def run_training(config: RunConfig, folder: Path, *, resume: bool = False) -> Manifest:
    """Train a run, and return the manifest of its last checkpoint."""
    data = prepare(config, Path(config.data.cache_folder))
    with TerminalView() as view:
        job = Training(config, TrainTask(folder, resume, time.time()))
        assert job.run(TOPOLOGY, lambda: data, view) == ExitCode.DONE
    return Checkpoint.newest_valid(folder, print).manifest


def test_scores_of_the_other_run_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: file.write("<svg></svg>"))  # slow
    old, new = tmp_path / "old", tmp_path / "new"
    train = {"max_steps": 4, "eval_every_steps": 2, "log_every_steps": 1}
    before = run_training(day(tmp_path, 1, train=train), old)
    perfect = {**before.progress, "best": ["auc", 1.0, 4]}
    (step,) = (old / "checkpoints").glob("step-*4")
    dataclasses.replace(before, progress=perfect).write(step)
    after = run_training(day(tmp_path, 2, old, train=train), new)
    records = read_records(new / METRICS_FILE)
    assert [each["step"] for each in records if each["kind"] == "train"] == [1, 2, 3, 4]
    evaluated = {each["step"]: each["auc"] for each in records if each["kind"] == "validation"}
    assert after.best is not None
    assert evaluated[after.best.step] == after.best.value == max(evaluated.values()) < 1
    assert after.progress["samples"] == before.progress["samples"]
    shutil.rmtree(old)  # a resumed run has its own checkpoints
    resumed = day(tmp_path, 2, old, train={**train, "max_steps": 5})
    assert run_training(resumed, new, resume=True).step == 5


@pytest.mark.parametrize("update", [pytest.param("sync", marks=pytest.mark.long), "lookahead"])
def test_one_process_starts_with_the_same_model(update: str, stored: Path, tmp_path: Path) -> None:
    train = {"update": update, "dtype": "float64"}
    config = day(tmp_path, 2, stored, train=train)
    data = prepare(config, Path(config.data.cache_folder))
    with TerminalView() as view:
        job = Comparison(config, CompareTask(4, tmp_path / "result"))
        assert job.run(TOPOLOGY, lambda: data, view) == ExitCode.DONE
