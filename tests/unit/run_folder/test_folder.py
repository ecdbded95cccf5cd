"""The run folder: what it holds, that it is never overwritten, and what a full disk looks like."""

import dataclasses
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from hybrid.config import RunConfig, TrainSection
from hybrid.config.loading import load_config
from hybrid.errors import ConfigError, HybridError
from hybrid.metrics import BinaryMetrics
from hybrid.primitives.step_timings import STEP, Span
from hybrid.protocol.update_rules import Staleness
from hybrid.topology import Role, RoleKind
from workers.console.progress_lines import TrainingProgress
from workers.run_folder.run_files import RunFolder
from workers.run_folder.run_state import RunState
from workers.step_profile import Profile

CONFIG = RunConfig(train=TrainSection(epochs=3))
METRICS = BinaryMetrics(0.7712, 0.4532, 0.8123, 1.01, 0.8, 0.25, 1000).as_dict()
PHASE_SECONDS = {"data": 0.0, "lookup": 1.0, "dense": 1.0, "backward": 2.0, "update": 0.0}


def _progress(step: int, loss: float = 0.5, auc: float = 0.7) -> TrainingProgress:
    return TrainingProgress(
        step=step,
        total_steps=100,
        epoch=1,
        epochs=1,
        loss=loss,
        score_name="auc",
        score=auc,
        samples_per_second=1000.0,
        seconds_left=1.0,
        phase_seconds=PHASE_SECONDS,
    )


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
    with RunFolder.create(tmp_path / "runs" / "first", CONFIG) as folder:
        yield folder


def test_a_new_folder_says_what_runs_on_what(folder: RunFolder) -> None:
    assert load_config(folder.path / "config.toml") == CONFIG
    versions = json.loads((folder.path / "versions.json").read_text())
    assert {"hybrid", "python", "torch", "numpy", "git_commit", "platform", "cpu_count", "started"} <= set(
        versions
    )
    assert versions["cpu_count"] == os.cpu_count()
    assert {path.name.partition(".")[0] for path in folder.path.iterdir()} == {
        "config", "versions", "metrics", "events"
    }  # fmt: skip


def test_outside_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    RunFolder.create(tmp_path / "run", CONFIG).close()
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["git_commit"] is None


def test_every_line_is_on_disk_once_logged(folder: RunFolder) -> None:
    folder.log_progress(_progress(10, auc=math.nan))
    folder.log_evaluation(10, METRICS)
    train, test = _records(folder.path)
    assert (train.pop("kind"), test.pop("kind")) == ("train", "test")
    assert train.pop("time") <= test.pop("time")
    assert train == {
        "step": 10,
        "loss": 0.5,
        "auc": None,
        "samples_per_second": 1000.0,
        "phase_seconds": PHASE_SECONDS,
    }
    assert test == {"step": 10, **METRICS}


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_that_json_cannot_hold_is_null(folder: RunFolder, loss: float) -> None:
    folder.log_progress(_progress(10, loss=loss))
    (record,) = _records(folder.path)
    assert record["loss"] is None


def test_staleness_is_logged_where_there_is_any(folder: RunFolder) -> None:
    folder.log_progress(dataclasses.replace(_progress(10), staleness=Staleness(8, 10, 3)))
    folder.log_progress(_progress(20))
    stale, fresh = _records(folder.path)
    assert (stale["staleness_mean"], stale["staleness_largest"]) == (1.25, 3)
    assert not any(key.startswith("staleness") for key in fresh)
    assert _scalars(folder.path)["train/staleness_mean"] == [(10, 1.25)]


def test_tensorboard_reads_the_same_numbers(folder: RunFolder) -> None:
    folder.log_progress(_progress(10, auc=math.nan))
    folder.log_progress(_progress(20, loss=0.25, auc=0.75))
    folder.log_evaluation(20, {**METRICS, "log_loss": 0.375})
    scalars = _scalars(folder.path)
    assert scalars["train/loss"] == [(10, 0.5), (20, 0.25)]
    assert scalars["train/auc"] == [(20, 0.75)]
    assert scalars["time_share/backward"] == [(10, 0.5), (20, 0.5)]
    assert scalars["test/log_loss"] == [(20, 0.375)]


def test_logging_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with RunFolder.create(tmp_path / "run", CONFIG) as folder:
        folder.log_progress(_progress(10))
        assert threading.active_count() == before


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_the_end_of_a_run(folder: RunFolder, steps: int) -> None:
    for step in range(1, steps + 1):
        folder.log_progress(_progress(step, auc=math.nan))
    if steps:
        folder.log_evaluation(steps, {**METRICS, "auc": math.nan})
    folder.finish({"test": {"auc": math.nan}, "steps": steps})
    assert json.loads((folder.path / "result.json").read_text()) == {"test": {"auc": None}, "steps": steps}
    assert folder.curves.read_bytes().startswith(b"\x89PNG")
    assert "MPLCONFIGDIR" not in os.environ


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "result.json"])
def test_a_folder_with_a_run_is_refused_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(ConfigError, match="contains a run already") as caught:
        RunFolder.create(tmp_path, CONFIG)
    assert caught.value.key == "run.folder"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HybridError, match=r"file/run: cannot be written: Not a directory; "):
        RunFolder.create(tmp_path / "file" / "run", CONFIG)


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder.create(path, CONFIG) as folder:
        for step in (10, 20, 30):
            folder.log_progress(_progress(step, loss=1.0))
        folder.finish({})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "ste')  # killed while writing
    with RunFolder.reopen(path, RunConfig(), step=20) as folder:
        assert not (path / "result.json").exists()
        for step in (30, 40):
            folder.log_progress(_progress(step, loss=2.0))
    expected = [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    assert [(record["step"], record["loss"]) for record in _records(path)] == expected
    assert _scalars(path)["train/loss"] == expected


@pytest.mark.parametrize(
    "damage",
    ["\0" * 40, '{"kind": "tr', '{"kind": "train"}', "[]", "\ud800"],
    ids=["nuls", "cut", "no step", "list", "bytes"],
)
def test_a_damaged_line_is_left_out(tmp_path: Path, damage: str) -> None:
    """As a power cut leaves one, in which what was not written yet is zeros."""
    path = tmp_path / "run"
    with RunFolder.create(path, CONFIG) as folder:
        folder.log_progress(_progress(10))
        with (path / "metrics.jsonl").open("ab") as file:
            file.write(damage.encode(errors="surrogatepass") + b"\n")
        folder.log_progress(_progress(20))
        folder.finish({})
    assert RunState.of(path).logged_step == 20
    RunFolder.reopen(path, CONFIG, step=20).close()
    assert [record["step"] for record in _records(path)] == [10, 20]


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_an_evaluation_that_is_owed_is_not_logged_twice(tmp_path: Path, is_evaluated: bool) -> None:
    path = tmp_path / "run"
    with RunFolder.create(path, CONFIG) as folder:
        for step in (10, 20):
            folder.log_progress(_progress(step))
            folder.log_evaluation(step, METRICS)
    RunFolder.reopen(path, CONFIG, 20, is_evaluated).close()
    logged = [("train", 10), ("test", 10), ("train", 20), *([("test", 20)] if is_evaluated else [])]
    assert [(record["kind"], record["step"]) for record in _records(path)] == logged


@pytest.mark.parametrize("left", [[], ["config.toml"], ["config.toml", "versions.json"]], ids=len)
def test_a_run_that_was_killed_before_its_first_line_begins_again(tmp_path: Path, left: list[str]) -> None:
    path = tmp_path / "run"
    if left:
        path.mkdir()
    for name in left:
        (path / name).write_text("{}")
    with RunFolder.reopen(path, CONFIG, step=0) as folder:
        folder.log_progress(_progress(1))
    assert [record["step"] for record in _records(path)] == [1]
    assert load_config(path / "config.toml") == CONFIG
    assert (path / "versions.json").exists()


def test_checkpoints_are_logged_with_what_they_cost(folder: RunFolder) -> None:
    folder.log_progress(_progress(20))
    folder.log_checkpoint(10, 0.25, 2.0, 1 << 20)
    folder.sync()
    record = _records(folder.path)[1]
    assert record.pop("time") > 0
    assert record == {
        "kind": "checkpoint", "step": 10, "seconds_stopped": 0.25, "seconds_writing": 2.0, "bytes": 1 << 20
    }  # fmt: skip
    folder.finish({})  # draws the curves past it


def _fill_disk_under(path: Path) -> None:
    """Let this process's open file at ``path`` meet a full disk."""
    links = Path("/proc/self/fd").iterdir()
    (descriptor,) = [int(link.name) for link in links if link.exists() and link.samefile(path)]
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)


@pytest.mark.parametrize("pattern", ["metrics.jsonl", "events.out.tfevents.*"])
def test_a_full_disk_while_logging(tmp_path: Path, pattern: str) -> None:
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    (path,) = folder.path.glob(pattern)
    _fill_disk_under(path)
    with pytest.raises(HybridError) as caught:
        folder.log_progress(_progress(10))
    what_to_do = "free space there, or set run.folder to another folder"
    assert str(caught.value) == f"{path}: cannot be written: No space left on device; {what_to_do}"
    folder.close()


@pytest.mark.parametrize("name", ["result.json", "curves.png"])
def test_a_full_disk_at_the_end(folder: RunFolder, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "curves" if name == "curves.png" else "run_files"
    monkeypatch.setattr(f"workers.run_folder.{module}.open_file", _on_a_full_disk)
    with pytest.raises(HybridError, match=f"{name}: cannot be written: No space left on device"):
        folder.finish({"auc": 0.5})
    assert not list(folder.path.glob("*result.json*"))


def _on_a_full_disk(path: str, flags: int) -> int:
    Path(path).touch()
    return os.open("/dev/full", os.O_WRONLY)


def test_a_profile_is_written_over_the_last_one(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Role(RoleKind.TRAINER, 0)
    for step in (3, 4):
        written = folder.write_profile(Profile({trainer: [Span(STEP, step, 0, 1000, "steps", 0)]}))
    assert written == folder.path / "profile"
    assert "steps 4 to 4" in (written / "table.md").read_text()
    monkeypatch.setattr("workers.step_profile.open_file", _on_a_full_disk)
    with pytest.raises(HybridError, match="profile: cannot be written: No space left on device"):
        folder.write_profile(Profile({trainer: [Span(STEP, 5, 0, 1000, "steps", 0)]}))
