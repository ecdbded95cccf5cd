"""The files and the loggers of a run: their content, resumed runs, a full disk, and broken loggers."""

import errno
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import eventually
from support.progress import METRICS, PROGRESS, progress
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from hybrid.config import ClusterSection, RunConfig, TrainSection
from hybrid.config.loading import load_config
from hybrid.errors import ConfigError
from hybrid.loggers.record_file import AppendOnlyFile
from hybrid.loggers.run_loggers import RunLoggers
from workers.run_folder.run_access import RunState
from workers.run_folder.run_files import RunFolder

CONFIG = RunConfig(train=TrainSection(epochs=3))


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def _scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(path))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder(tmp_path / "runs" / "first", CONFIG) as folder:
        yield folder


def test_a_new_run_folder_records_configuration_and_versions(folder: RunFolder) -> None:
    assert load_config(folder.path / "config.toml") == CONFIG
    versions = json.loads((folder.path / "versions.json").read_text())
    names = {"hybrid", "python", "torch", "numpy", "git_commit", "platform", "cpu_count", "started"}
    assert names <= versions.keys()
    assert versions["cpu_count"] == os.cpu_count()
    names = {"config", "versions", "metrics"}
    assert names <= {path.name.partition(".")[0] for path in folder.path.iterdir()} <= {*names, "events"}


def test_each_record_is_written_at_once(folder: RunFolder) -> None:
    folder.log_progress(progress(10, loss=math.inf, score=math.nan))
    folder.log("test", 10, METRICS)
    train, test = _records(folder.path)
    assert (train.pop("kind"), test.pop("kind")) == ("train", "test")
    assert train.pop("time") <= test.pop("time")
    numbers = {"loss": None, "auc": None, "samples_per_second": 1000.0}
    assert train == {"step": 10, **numbers, "phase_seconds": PROGRESS.phase_seconds}
    assert test == {"step": 10, **METRICS}


def test_tensorboard_reads_the_same_numbers_and_the_configuration(folder: RunFolder) -> None:
    folder.log_progress(progress(10, score=math.nan))
    folder.log_progress(progress(20, loss=0.25, score=0.75))
    folder.log("test", 20, {**METRICS, "log_loss": 0.375})
    folder.finish({})
    scalars = _scalars(folder.path)
    assert scalars["train/loss"] == [(10, 0.5), (20, 0.25)]
    assert scalars["train/auc"] == [(20, 0.75)]
    assert scalars["time_share/backward"] == [(10, 0.5), (20, 0.5)]
    assert scalars["test/log_loss"] == [(20, 0.375)]
    events = EventAccumulator(str(folder.path))
    events.Reload()
    (text,) = events.Tensors("config")
    assert "    train.epochs = 3\n" in text.tensor_proto.string_val[0].decode()
    assert events.SummaryMetadata("config").plugin_data.plugin_name == "text"


@pytest.mark.parametrize("steps", [0, 40])
def test_a_finished_run_has_a_result_and_a_report(folder: RunFolder, steps: int) -> None:
    for step in range(1, steps + 1):
        folder.log_progress(progress(step, score=math.nan))
    if steps:
        folder.log("test", steps, {**METRICS, "auc": math.nan})
    folder.finish({"test": {"auc": math.nan}, "steps": steps})
    assert json.loads((folder.path / "result.json").read_text()) == {"test": {"auc": None}, "steps": steps}
    assert folder.report.read_text().count("<svg") == (4 if steps else 0)


def test_a_resumed_run_drops_later_records(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder(path, CONFIG) as folder:
        for step in (10, 20, 30):
            folder.log_progress(progress(step, loss=1.0))
    (path / "result.json").touch()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "ste')  # killed while writing
    with RunFolder(path, RunConfig(), step=20) as folder:
        assert not (path / "result.json").exists()
        for step in (30, 40):
            folder.log_progress(progress(step, loss=2.0))
    expected = [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    assert [(record["step"], record["loss"]) for record in _records(path)] == expected
    assert _scalars(path)["train/loss"] == expected


DAMAGED = ["\0" * 40, '{"kind": "tr', '["kind"]', '"', "15", "\ud800", 100_000 * "["]


def test_damaged_records_are_skipped(tmp_path: Path) -> None:
    """A power cut leaves zeros in place of bytes that were not written yet."""
    path = tmp_path / "run"
    with RunFolder(path, CONFIG) as folder:
        folder.log_progress(progress(10))
        with (path / "metrics.jsonl").open("ab") as file:
            file.writelines(line.encode(errors="surrogatepass") + b"\n" for line in DAMAGED)
        folder.log_progress(progress(20))
    assert RunState.of(path).logged_step == 20
    RunFolder(path, CONFIG, step=20).close()
    assert [record["step"] for record in _records(path)] == [10, 20]


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_an_evaluation_is_not_logged_twice(tmp_path: Path, is_evaluated: bool) -> None:
    path = tmp_path / "run"
    with RunFolder(path, CONFIG) as folder:
        for step in (10, 20):
            folder.log_progress(progress(step))
            folder.log("test", step, METRICS)
    RunFolder(path, CONFIG, 20, is_evaluated).close()
    logged = [("train", 10), ("test", 10), ("train", 20), *([("test", 20)] if is_evaluated else [])]
    assert [(record["kind"], record["step"]) for record in _records(path)] == logged


@pytest.mark.parametrize("left", [[], ["config.toml"], ["config.toml", "versions.json"]], ids=len)
def test_a_run_without_records_can_be_resumed(tmp_path: Path, left: list[str]) -> None:
    path = tmp_path / "run"
    if left:
        path.mkdir()
    for name in left:
        (path / name).write_text("{}")
    with RunFolder(path, CONFIG, step=0) as folder:
        folder.log_progress(progress(1))
    assert [record["step"] for record in _records(path)] == [1]
    assert load_config(path / "config.toml") == CONFIG
    assert (path / "versions.json").exists()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes of a disk, which writes as many bytes as are free."""
    left = [1 << 20]
    write = os.write

    def limited(descriptor: int, content: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, content[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    return left


@pytest.mark.parametrize("makes_room", [False, True])
def test_a_record_that_does_not_fit_leaves_nothing(tmp_path: Path, room: list[int], makes_room: bool) -> None:
    def make_room() -> bool:
        room[0] = 100
        return makes_room

    file = AppendOnlyFile(tmp_path / "f", make_room)
    file.write(b"first\n")
    room[0] = 3
    if makes_room:
        file.write(b"second\n")
    else:
        with pytest.raises(OSError, match="No space"):
            file.write(b"second\n")
    file.write(b"third\n")
    file.close()
    lines = ["first", "second", "third"] if makes_room else ["first", "third"]
    assert (tmp_path / "f").read_text().splitlines() == lines


# A logger writes its calls to a file in the run folder, and fails or hangs in the method FAULT.
USER_MODULE = """
import json, pathlib, threading
class Logger:
    FAULT, hangs = "none", threading.Event()
    def note(self, method, *values):
        if self.FAULT == method:
            raise SystemExit(f"{method} is broken")
        if self.FAULT == f"hang in {method}":
            Logger.hangs.set()
            threading.Event().wait()
        with open(self.folder / "calls", "a") as file:
            file.write(json.dumps([method, *values]) + chr(10))
    def start(self, run):
        self.folder = run.folder
        self.note("start", run.name, run.step, run.config["train.epochs"], run.config["run.name"])
    def log(self, step, values):
        self.note("log", step, values)
    def finish(self, result):
        self.note("finish", result)
class NoLogger:
    def start(self, run): ...
    def finish(self, result): ...
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "my_logger.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_logger")
    del sys.modules["my_logger"]


def config_of(*loggers: str) -> RunConfig:
    return RunConfig(cluster=ClusterSection(loggers=loggers), train=TrainSection(epochs=3))


def log(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        folder.log("test", step, {"auc": step / 100, "log_loss": float("nan")})


def test_a_class_of_the_user_gets_all_numbers(tmp_path: Path, user_module: Any) -> None:
    config = config_of("my_logger:Logger")
    with RunFolder(tmp_path / "run", config) as folder:
        log(folder, 10, 20)
    with RunFolder(tmp_path / "run", config, 10) as folder:
        log(folder, 20)
        folder.finish({"auc": 0.25, "log_loss": float("nan")})
    calls = [json.loads(line) for line in (tmp_path / "run/calls").read_text().splitlines()]
    assert calls == [
        ["start", "run", 0, 3, "run"],
        ["log", 10, {"test/auc": 0.1}],
        ["log", 20, {"test/auc": 0.2}],
        ["finish", None],
        ["start", "run", 10, 3, "run"],
        ["log", 20, {"test/auc": 0.2}],
        ["finish", {"auc": 0.25, "log_loss": None}],
    ]


@pytest.mark.parametrize("fault", ["start", "log", "finish", "hang in log"])
def test_a_broken_logger_is_left_out(fault: str, tmp_path: Path, user_module: Any) -> None:
    user_module.Logger.FAULT = fault
    warnings: list[str] = []
    config = config_of("my_logger:Logger", "tensorboard")
    folder = RunFolder(tmp_path / "run", config, loggers=RunLoggers(config, warnings.append))
    log(folder, *range(10, 2000, 10))
    folder.close(seconds=1.0 if fault == "hang in log" else 60.0)
    (warning,) = warnings
    assert "my_logger:Logger" in warning
    assert ("my_logger.py:" in warning) == (not fault.startswith("hang"))
    (events,) = (tmp_path / "run").glob("events.*")
    for path in (tmp_path / "run/metrics.jsonl", events):
        assert path.read_bytes().count(b"test/auc" if path == events else b"\n") == 199


@pytest.mark.parametrize(("seconds", "steps"), [(1e4, 1), (0, 5000)])
def test_a_logger_that_does_not_respond_is_left_out(
    seconds: float, steps: int, tmp_path: Path, user_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_module.Logger.FAULT = "hang in start"
    warnings: list[str] = []
    config = config_of("my_logger:Logger")
    loggers = RunLoggers(config, warnings.append)
    loggers.start("run", tmp_path, 0)
    assert user_module.Logger.hangs.wait(20)
    later = time.monotonic() + seconds
    monkeypatch.setattr(time, "monotonic", lambda: later)
    for step in range(steps):
        loggers.log(step, {"loss": 1.0})
    assert len(warnings) == 1


@pytest.mark.parametrize("name", ["my_logger:NoLogger", "my_logger:Missing", "absent:Logger", "wandb"])
def test_an_unusable_logger_is_refused(name: str, user_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=rf"^cluster\.loggers = '{name}': "):
        RunLoggers(config_of(name), print)


def run_twice(folder: Path, config: RunConfig) -> list[str]:
    """Record a run that finishes with step 30, is resumed from step 20, and finishes with step 40."""
    warnings: list[str] = []
    with RunFolder(folder, config, loggers=RunLoggers(config, warnings.append)) as run:
        log(run, 10, 20, 30)
        run.finish({})
    with RunFolder(folder, config, 20, loggers=RunLoggers(config, warnings.append)) as run:
        log(run, 30, 40)
        run.finish({"auc": 0.5})
    return warnings


def test_mlflow_shows_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install 'hybrid-parallel[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr("socket.socket.connect", _refuse)
    assert run_twice(tmp_path / "run", config_of("mlflow")) == []
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.info.run_id == (tmp_path / "run/mlflow.txt").read_text()
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["train.epochs"] == "3"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "test/auc")
    assert [(each.step, each.value) for each in history] == [(10, 0.1), (20, 0.2), (30, 0.3), (40, 0.4)]


def test_wandb_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs W&B: pip install 'hybrid-parallel[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run_twice(tmp_path / "run", config_of("wandb")) == []
    run_id = (tmp_path / "run/wandb.txt").read_text()
    first, second = sorted((tmp_path / "run/wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    for name in (b"test/auc", b"train.epochs"):  # W&B's process writes them
        assert eventually(lambda: all(name in path.read_bytes() for path in (first, second)), 20.0)  # noqa: B023


def _refuse(*_: object) -> None:
    raise AssertionError("MLflow connects to a server")
