"""The loggers of a run: what they receive, that a broken one does no harm, and resumed runs in tools."""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import eventually

from hybrid.config import ClusterSection, RunConfig, TrainSection
from hybrid.errors import ConfigError
from hybrid.loggers.run_loggers import RunLoggers
from workers.run_folder.run_files import RunFolder

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
    with RunFolder.create(tmp_path / "run", config) as folder:
        log(folder, 10, 20)
    with RunFolder.reopen(tmp_path / "run", config, 10) as folder:
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
    folder = RunFolder.create(tmp_path / "run", config, RunLoggers(config, warnings.append))
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
def test_a_logger_that_cannot_be_used_is_refused_at_the_start(
    name: str, user_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=rf"^cluster\.loggers = '{name}': "):
        RunLoggers(config_of(name), print)


def run_twice(folder: Path, config: RunConfig) -> list[str]:
    """Record a run that finishes with step 30, is resumed from step 20, and finishes with step 40."""
    warnings: list[str] = []
    with RunFolder.create(folder, config, RunLoggers(config, warnings.append)) as run:
        log(run, 10, 20, 30)
        run.finish({})
    with RunFolder.reopen(folder, config, 20, loggers=RunLoggers(config, warnings.append)) as run:
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
