"""The checkpoints of a run: when they are written, failures, and which are kept."""

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from support.checkpoints import Call, names
from support.commands import eventually
from support.shards import PATIENCE_SECONDS
from support.stopped_runs import saved_steps
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import Best, Manifest, step_folder, write_text
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import CheckpointSection, ClusterSection, RunConfig
from hybrid.errors import CheckpointError, ClusterError, HybridError, OutageError
from hybrid.metrics import BinaryMetrics, Metrics
from hybrid.storage.remote_path import StoragePath
from workers.controller.deployment import HeldCheckpoint
from workers.controller.session import DatasetSession
from workers.jobs.checkpoint_schedule import Checkpoints, RunProgress
from workers.run_folder.run_files import RunFolder

NO_ROOM = "cannot write rows: No space left on device"


@dataclass
class Role:
    """A session whose only role writes one small file.

    Attributes:
        may_write: set when the file may be written.
        saved_steps: the steps of which a checkpoint began.
    """

    is_copied: bool = True
    may_write: threading.Event = field(default_factory=threading.Event)
    has_room: bool = True
    saved_steps: list[int] = field(default_factory=list)
    is_delta_due = False
    steps_per_epoch = 1 << 40

    def __post_init__(self) -> None:
        self.may_write.set()

    def meanwhile(self) -> None:
        """Let the file be written once training waits for it."""
        self.may_write.set()

    def begin_save(
        self, folder: Path, manifest: Manifest, reports: Mapping[str, Tensor], in_background: bool
    ) -> HeldCheckpoint:
        self.saved_steps.append(manifest.step)
        return HeldCheckpoint(folder, manifest, {}, reports, self._start, self.is_copied and in_background)

    def begin_delta(self, folder: Path, manifest: Manifest) -> HeldCheckpoint:
        return HeldCheckpoint(folder, manifest, {}, {}, self._start, is_copied=True)

    def _start(self, partial: StoragePath) -> Sequence[Call]:
        written: Future[Any] = Future()
        assert self.may_write.wait(PATIENCE_SECONDS)
        if self.has_room:
            written.set_result(write_text(partial, "rows", "text"))
        else:
            (Path(str(partial)) / "rows").write_text("te")
            written.set_exception(CheckpointError(NO_ROOM))
        return [Call(written)]


@dataclass
class Run:
    """A run whose steps the tests choose."""

    role: Role
    folder: RunFolder
    warnings: list[str]
    checkpoints: Checkpoints

    def at(self, step: int, auc: float | None = None, log_loss: float = 0.5) -> None:
        """Reach a step, with an evaluation if there is an AUC; wait for the checkpoint if one is due."""
        self.reach(step, auc, log_loss)
        self.checkpoints.finish()

    def reach(self, step: int, auc: float | None = None, log_loss: float = 0.5) -> None:
        self.checkpoints.write_if_due(state(step, auc, log_loss), is_evaluated=auc is not None)

    @property
    def stored(self) -> list[int]:
        return sorted(saved_steps(self.folder.path))

    @property
    def logged(self) -> list[int]:
        lines = (self.folder.path / "metrics.jsonl").read_text().splitlines()
        return [record["step"] for record in map(json.loads, lines) if record["kind"] == "checkpoint"]


def metrics_of(auc: float, log_loss: float) -> Metrics:
    return BinaryMetrics(auc, log_loss, 1.0, 1.0, 0.5, 0.5, 10)._asdict()


def state(step: int, auc: float | None = None, log_loss: float = 0.5, *, owes: bool = False) -> RunProgress:
    metrics = None if auc is None else metrics_of(auc, log_loss)
    return RunProgress(step, metrics, owes, samples=10 * step)


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts or resumes the run."""
    opened: list[RunFolder] = []

    def make(best: Best | None = None, **keys: Any) -> Run:
        section = CheckpointSection(**{"every_steps": 10, "every_minutes": 0.0, "keep_best": "auc", **keys})
        config = RunConfig(cluster=ClusterSection(loggers=()))
        opened.append(RunFolder(tmp_path / "run", config, 1 << 40))
        warnings: list[str] = []
        role = Role()
        written = Checkpoints(cast(DatasetSession, role), opened[-1], section, warnings.append, best)
        return Run(role, opened[-1], warnings, written)

    yield make
    for folder in opened:
        folder.close()


def test_checkpoints_are_due_by_steps(start: Start) -> None:
    run = start(every_steps=4, keep_last=9)
    assert [run.checkpoints.steps_to_next(step) for step in (0, 1, 3, 4, 10)] == [4, 3, 1, 4, 2]
    for step in range(1, 10):
        run.at(step)
    assert run.stored == run.logged == run.role.saved_steps == [4, 8]
    assert not run.warnings


@pytest.mark.long
def test_a_checkpoint_follows_a_thousand_deltas(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new follower applies the deltas since the last checkpoint."""
    monkeypatch.setattr("os.fsync", lambda _: None)  # as on a disk that is faster
    run = start(every_steps=0, deltas="every(steps = 1)")
    for step in range(1, 1006):
        run.at(step)
    assert run.role.saved_steps == [1, 1002]


def test_a_failed_delta_is_followed_by_a_checkpoint_when_one_is_due(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every_steps=0, deltas="every(steps = 3)")
    run.at(3)
    with monkeypatch.context() as patches:
        refuse = Mock(side_effect=CheckpointError(NO_ROOM))
        patches.setattr(Role, "begin_delta", refuse)
        run.at(6)
    assert len(run.warnings) == refuse.call_count == 1
    stored = []
    for step in (7, 8, 9):
        run.at(step)
        stored.append(run.stored)
    assert stored == [[3], [3], [3, 9]]


def test_checkpoints_are_due_by_minutes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("workers.jobs.checkpoint_schedule.time.monotonic", lambda: clock[0])
    run = start(every_steps=0, every_minutes=0.5, keep_last=9)
    assert run.checkpoints.steps_to_next(7) == math.inf
    for step in range(1, 13):
        clock[0] += 10.0
        run.at(step)
    assert run.stored == [3, 6, 9, 12]
    for step, has_room in ((13, True), (14, False)):
        run.role.has_room = has_room
        for _ in range(7):  # waiting for rows
            clock[0] += 10.0
            run.checkpoints.write_if_due(state(step), is_evaluated=False, is_waiting=True)
            run.checkpoints.finish()
    assert run.role.saved_steps == [3, 6, 9, 12, 13, 14, 14, 14]


@pytest.mark.parametrize(
    ("keep_best", "kept"), [("auc", [2, 10]), ("log_loss", [6, 10]), ("none", [10])], ids=str
)
def test_a_best_checkpoint_is_written_at_once_and_kept(start: Start, keep_best: str, kept: list[int]) -> None:
    run = start(keep_best=keep_best, keep_last=1)
    run.at(1, math.nan, math.nan)  # any number is better
    for step, auc, log_loss in ((2, 0.8, 0.5), (4, 0.7, 0.6), (6, 0.8, 0.4), (8, math.nan, math.nan)):
        run.at(step, auc, log_loss)
    run.at(10)
    assert run.stored == kept


def test_the_log_is_flushed_before_a_checkpoint(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    stored_then: list[list[int]] = []
    monkeypatch.setattr(RunFolder, "sync", lambda self: stored_then.append(run.stored))
    run.at(10)
    run.at(20)
    assert stored_then == [[], [10]]
    run.checkpoints.write_last(state(25, owes=True), is_stopped=True)
    owed: list[bool] = []
    monkeypatch.setattr(RunFolder, "sync", lambda _: owed.append(progress_of(run, 25)["owes_evaluation"]))
    run.checkpoints.write_last(state(25, 0.5))
    assert owed == [True]


def test_a_resumed_run_has_the_best_evaluation(start: Start, tmp_path: Path) -> None:
    run = start(keep_last=1)
    run.at(2, 0.8)
    run.at(10)
    manifest = Checkpoint.newest_valid(tmp_path / "run", pytest.fail).manifest
    assert manifest.progress["samples"] == 100
    run = start(manifest.best, keep_last=1)
    run.at(12, 0.7)
    run.at(20)
    assert run.stored == [2, 20]
    run.at(22, 0.9)
    assert run.stored == [22]


def test_training_continues_during_a_write(start: Start) -> None:
    run = start()
    run.role.may_write.clear()
    run.reach(10)
    run.checkpoints.poll()
    assert run.stored == []
    run.role.may_write.set()

    def is_polled() -> bool:
        run.checkpoints.poll()
        return bool(run.logged)

    assert eventually(is_polled, PATIENCE_SECONDS)
    assert run.stored == run.logged == [10]


def test_a_checkpoint_waits_for_the_pending_one(start: Start) -> None:
    run = start(keep_last=9)
    run.role.may_write.clear()
    run.reach(10, 0.8)
    begun_at = time.monotonic()
    run.reach(20)
    assert time.monotonic() - begun_at >= 0.05
    assert run.logged == [10]
    run.checkpoints.finish()
    assert run.logged == [10, 20]
    record = json.loads((run.folder.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["seconds_stopped"] >= 0.05
    assert record["bytes"] == len("text")
    run.at(22, 0.7)
    assert run.stored == [10, 20], "the best one was still under way when the next began"


def test_training_waits_without_memory_for_copies_and_warns_once(start: Start) -> None:
    run = start(keep_last=9)
    run.role.is_copied = False
    for step in (10, 20):
        run.role.may_write.clear()
        run.reach(step)
        assert run.stored[-1] == step
    run.checkpoints.finish()
    assert len(run.warnings) == 1


def test_a_failed_checkpoint_is_reported_and_the_next_is_written(start: Start) -> None:
    run = start()
    run.at(10)
    run.role.has_room = False
    run.at(20, 0.8)
    run.at(25)
    assert [line.partition(";")[0] for line in run.warnings] == [f"no checkpoint of step 20: {NO_ROOM}"]
    assert names(run.folder.path / "checkpoints") == ["step-00000010"]
    run.role.has_room = True
    run.at(30, 0.7)
    assert run.stored == [10, 30]
    assert run.logged == [10, 30]


def test_training_continues_if_a_store_refuses_to_list(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    run.at(10)

    def refuse(folder: Path) -> list[Path]:
        raise OutageError("s3: cannot be listed")

    with monkeypatch.context() as down:
        down.setattr("workers.jobs.checkpoint_schedule.checkpoint_folders.list_checkpoints", refuse)
        run.at(20)
        assert [line.partition(": ")[0] for line in run.warnings] == ["no checkpoint of step 20"]
        down.setattr("workers.jobs.checkpoint_schedule.checkpoint_folders.begin", refuse)
        with pytest.raises(CheckpointError) as caught:
            run.checkpoints.write_last(state(25))
    assert caught.value.kind is OutageError
    run.at(30)
    assert run.stored == [10, 30]


def test_metrics_of_a_failed_checkpoint_make_no_later_step_the_best(start: Start) -> None:
    run = start(every_steps=0, keep_best="auc")
    run.role.has_room = False
    run.at(20, 0.8)
    assert len(run.warnings) == 1
    run.role.has_room = True
    run.checkpoints.write_if_due(state(25, 0.8), is_evaluated=False)
    run.checkpoints.finish()
    assert run.role.saved_steps == [20]


def test_the_log_awaits_space_of_a_failing_checkpoint(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    run.role.has_room = False
    run.role.may_write.clear()
    run.reach(10)
    partial = run.folder.path / "checkpoints" / "step-00000010.partial"
    write = os.write

    def write_if_room(descriptor: int, content: memoryview) -> int:
        has_no_room = partial.exists()
        run.role.may_write.set()
        if has_no_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    monkeypatch.setattr("workers.run_folder.run_files.os.write", write_if_room)
    assert eventually(partial.exists, PATIENCE_SECONDS)
    run.folder.log("test", 10, metrics_of(0.5, 0.5))
    log = run.folder.path / "metrics.jsonl"
    assert len(log.read_text().splitlines()) == 1
    assert len(run.warnings) == 1
    partial.mkdir()
    with pytest.raises(HybridError, match=rf"^{log}: .*run\.folder"):  # there is nothing to wait for
        run.folder.log("test", 20, metrics_of(0.5, 0.5))


def test_a_failed_removal_is_reported(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(keep_last=1)
    run.at(10)

    def refuse(folder: Path) -> None:
        raise CheckpointError(f"cannot write {folder}: Operation not permitted")

    monkeypatch.setattr("hybrid.checkpoint.checkpoint_folders.remove", refuse)
    run.at(20)
    assert run.stored == run.logged == [10, 20]
    assert len(run.warnings) == 1


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_last_checkpoint_must_be_written(start: Start, is_stopped: bool) -> None:
    run = start()
    run.at(10)
    run.role.has_room = False
    with pytest.raises(CheckpointError, match=f"^{NO_ROOM}; "):
        run.checkpoints.write_last(state(15, 0.5), is_stopped)
    assert run.stored == [10]


def progress_of(run: Run, step: int) -> dict[str, Any]:
    return Checkpoint.open(step_folder(run.folder.path, step)).manifest.progress


@pytest.mark.parametrize("owes", [True, False])
def test_the_checkpoint_of_a_stop_has_the_best_and_the_pending_evaluation(start: Start, owes: bool) -> None:
    run = start()
    run.at(2, 0.8)
    run.checkpoints.write_last(state(15, 0.9, owes=owes), is_stopped=True)
    assert run.stored == [2, 15]
    assert progress_of(run, 15)["best"] == ["auc", 0.8, 2]  # 0.9 is of an earlier step
    assert progress_of(run, 15)["owes_evaluation"] == owes


@pytest.mark.parametrize("is_last", [True, False])
def test_the_checkpoint_of_a_stop_may_become_the_best(start: Start, is_last: bool) -> None:
    run = start(keep_last=1)
    run.at(2, 0.8)
    run.checkpoints.write_last(state(20, owes=True), is_stopped=True)
    again = start(run.checkpoints.best, keep_last=1)
    if is_last:
        again.checkpoints.write_last(state(20, 0.9))
    else:
        again.at(20, 0.9)
    assert again.checkpoints.best == ("auc", 0.9, 20)
    assert (again.warnings, again.stored) == ([], [20])
    added = {"best": ["auc", 0.9, 20], "owes_evaluation": False}
    assert progress_of(again, 20) == progress_of(run, 20) | added
    assert Checkpoint.best_valid(again.folder.path, print).manifest.metrics["auc"] == 0.9
    again.at(30)
    assert (again.warnings, again.stored) == ([], [20, 30])


def test_a_checkpoint_stays_without_its_evaluation(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    run.checkpoints.write_last(state(20, owes=True), is_stopped=True)
    again = start(run.checkpoints.best)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        again.at(20, 0.9)
        assert len(again.warnings) == 1
        assert again.warnings[0].startswith("no checkpoint of step 20: cannot write")
        with pytest.raises(CheckpointError, match="not saved"):
            again.checkpoints.write_last(state(20, 0.9))
    assert again.checkpoints.best is None
    assert progress_of(again, 20)["owes_evaluation"]


def test_other_errors_end_the_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()

    def lose(self: HeldCheckpoint) -> Manifest:
        raise ClusterError("worker 0 is gone")

    monkeypatch.setattr(HeldCheckpoint, "write", lose)
    run.reach(10)
    with pytest.raises(ClusterError, match="worker 0"):
        run.checkpoints.finish()
