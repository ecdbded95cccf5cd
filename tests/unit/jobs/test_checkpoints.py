"""The checkpoints of a run: when one is written, what happens where one cannot be, and which are kept."""

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from support.checkpoints import Call, names
from support.commands import eventually
from support.shards import PATIENCE_SECONDS

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.checkpoint.checkpoint_manifest import Manifest, write_text
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import CheckpointSection, RunConfig
from hybrid.errors import CheckpointError, ClusterError, HybridError, OutageError, StorageError
from hybrid.metrics import BinaryMetrics, Metrics
from hybrid.storage.remote_path import StoragePath
from workers.controller.deployment import Counted, Saving
from workers.controller.session import Session
from workers.jobs.checkpoint_schedule import Checkpoints, Moment
from workers.jobs.run_counters import Tally
from workers.run_folder.run_files import RunFolder

NO_ROOM = "cannot write rows: No space left on device"


@dataclass
class Role:
    """A cluster of one role, which writes one small file."""

    is_copied: bool = True
    may_write: threading.Event = field(default_factory=threading.Event)
    has_room: bool = True
    held: list[int] = field(default_factory=list)  # the steps of which it held something
    config: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self.may_write.set()

    def meanwhile(self) -> None:
        """Called while something is waited for, until when nothing may be written."""
        self.may_write.set()

    def begin_save(
        self,
        folder: Path,
        step: int,
        epoch: int,
        metrics: Metrics | None,
        progress: Counted,
        in_background: bool,
    ) -> Saving:
        self.held.append(step)
        values = dict(metrics or {})
        listed = Manifest(step, epoch, {}, {}, values, dict(progress.values))
        return Saving(folder, listed, {}, progress.reports, self._start, self.is_copied and in_background)

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
    """A run, of which the tests say when it is where."""

    role: Role
    folder: RunFolder
    said: list[str]
    checkpoints: Checkpoints

    def at(self, step: int, auc: float | None = None, log_loss: float = 0.5) -> None:
        """Come to a step, with an evaluation if there is an AUC; and wait for the checkpoint that is due."""
        self.come_to(step, auc, log_loss)
        self.checkpoints.finish()

    def come_to(self, step: int, auc: float | None = None, log_loss: float = 0.5) -> None:
        self.checkpoints.write_if_due(moment(step, auc, log_loss), is_evaluated=auc is not None)

    @property
    def stored(self) -> list[int]:
        return sorted(
            checkpoint_folders.parse_step(folder)
            for folder in checkpoint_folders.list_checkpoints(self.folder.path)
        )

    @property
    def logged(self) -> list[int]:
        lines = (self.folder.path / "metrics.jsonl").read_text().splitlines()
        return [record["step"] for record in map(json.loads, lines) if record["kind"] == "checkpoint"]


def metrics_of(auc: float, log_loss: float) -> Metrics:
    return BinaryMetrics(auc, log_loss, 1.0, 1.0, 0.5, 0.5, 10).as_dict()


def moment(step: int, auc: float | None = None, log_loss: float = 0.5, *, owes: bool = False) -> Moment:
    metrics = None if auc is None else metrics_of(auc, log_loss)
    return Moment(step, 0, metrics, Tally(samples=10 * step), owes)


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the run, or goes on with it."""
    opened: list[RunFolder] = []

    def make(progress: dict[str, Any] | None = None, **keys: Any) -> Run:
        section = CheckpointSection(**{"every_steps": 10, "every_minutes": 0.0, "keep_best": "auc", **keys})
        opened.append(RunFolder.reopen(tmp_path / "run", RunConfig(), 1 << 40))
        said: list[str] = []
        role = Role()
        written = Checkpoints(cast(Session, role), opened[-1], section, said.append, progress or {})
        return Run(role, opened[-1], said, written)

    yield make
    for folder in opened:
        folder.close()


def test_they_are_due_by_steps(start: Start) -> None:
    run = start(every_steps=4, keep_last=9)
    assert [run.checkpoints.steps_to_next(step) for step in (0, 1, 3, 4, 10)] == [4, 3, 1, 4, 2]
    for step in range(1, 10):
        run.at(step)
    assert run.stored == run.logged == run.role.held == [4, 8]
    assert not run.said


def test_they_are_due_by_minutes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("workers.jobs.checkpoint_schedule.time.monotonic", lambda: clock[0])
    run = start(every_steps=0, every_minutes=0.5, keep_last=9)
    assert run.checkpoints.steps_to_next(7) == math.inf
    for step in range(1, 13):
        clock[0] += 10.0
        run.at(step)
    assert run.stored == [3, 6, 9, 12]


@pytest.mark.parametrize(
    ("keep_best", "kept"), [("auc", [2, 10]), ("log_loss", [6, 10]), ("none", [10])], ids=str
)
def test_the_best_is_written_at_once_and_kept(start: Start, keep_best: str, kept: list[int]) -> None:
    run = start(keep_best=keep_best, keep_last=1)
    run.at(1, math.nan, math.nan)  # any number is better
    for step, auc, log_loss in ((2, 0.8, 0.5), (4, 0.7, 0.6), (6, 0.8, 0.4), (8, math.nan, math.nan)):
        run.at(step, auc, log_loss)
    run.at(10)
    assert run.stored == kept


def test_what_is_logged_is_safe_before_the_checkpoint_that_counts_on_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    stored_then: list[list[int]] = []
    monkeypatch.setattr(RunFolder, "sync", lambda self: stored_then.append(run.stored))
    run.at(10)
    run.at(20)
    assert stored_then == [[], [10]]
    run.checkpoints.write_last(moment(25, owes=True), is_stopped=True)
    owed: list[bool] = []
    monkeypatch.setattr(RunFolder, "sync", lambda _: owed.append(progress_of(run, 25)["owes_evaluation"]))
    run.checkpoints.write_last(moment(25, 0.5))
    assert owed == [True]


def test_a_resumed_run_knows_the_best(start: Start, tmp_path: Path) -> None:
    run = start(keep_last=1)
    run.at(2, 0.8)
    run.at(10)
    progress = Checkpoint.newest_valid(tmp_path / "run", pytest.fail).manifest.progress
    assert progress["samples"] == 100
    run = start(progress, keep_last=1)
    run.at(12, 0.7)
    run.at(20)
    assert run.stored == [2, 20]
    run.at(22, 0.9)
    assert run.stored == [22]
    run = start(progress, keep_last=1, keep_best="log_loss")  # which makes the AUC of before no measure
    run.at(24, 0.1, 9.0)
    assert run.stored == [24]


def test_training_goes_on_while_one_is_written(start: Start) -> None:
    run = start()
    run.role.may_write.clear()
    run.come_to(10)
    run.checkpoints.poll()
    assert run.stored == []
    run.role.may_write.set()

    def is_polled() -> bool:
        run.checkpoints.poll()
        return bool(run.logged)

    assert eventually(is_polled, PATIENCE_SECONDS)
    assert run.stored == run.logged == [10]


def test_the_next_one_waits_for_the_one_under_way(start: Start) -> None:
    run = start(keep_last=9)
    run.role.may_write.clear()
    run.come_to(10, 0.8)
    begun_at = time.monotonic()
    run.come_to(20)
    assert time.monotonic() - begun_at >= 0.05
    assert run.logged == [10]
    run.checkpoints.finish()
    assert run.logged == [10, 20]
    record = json.loads((run.folder.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["seconds_stopped"] >= 0.05
    assert record["bytes"] == len("text")
    run.at(22, 0.7)
    assert run.stored == [10, 20], "the best one was still under way when the next began"


def test_where_there_is_no_memory_for_copies_training_waits_and_that_is_said_once(start: Start) -> None:
    run = start(keep_last=9)
    run.role.is_copied = False
    for step in (10, 20):
        run.role.may_write.clear()
        run.come_to(step)
        assert run.stored[-1] == step
    run.checkpoints.finish()
    assert run.said == ["no memory for copies of the tables: training waits while checkpoints are written"]


def test_one_that_cannot_be_written_is_said_and_the_next_is_tried_when_due(start: Start) -> None:
    run = start()
    run.at(10)
    run.role.has_room = False
    run.at(20, 0.8)
    run.at(25)
    assert run.said == [f"no checkpoint of step 20: {NO_ROOM}; training continues"]
    assert names(run.folder.path / "checkpoints") == ["step-00000010"]
    run.role.has_room = True
    run.at(30, 0.7)
    assert run.stored == [10, 30]
    assert run.logged == [10, 30]


@pytest.mark.parametrize("error", [StorageError("s3: cannot be listed"), OutageError("s3: cannot be listed")])
def test_where_a_store_does_not_even_tell_what_is_there_training_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: StorageError
) -> None:
    run = start()
    run.at(10)

    def refuse(folder: Path) -> list[Path]:
        raise error

    with monkeypatch.context() as down:
        down.setattr("workers.jobs.checkpoint_schedule.checkpoint_folders.list_checkpoints", refuse)
        run.at(20)
        assert run.said == ["no checkpoint of step 20: s3: cannot be listed; training continues"]
        down.setattr("workers.jobs.checkpoint_schedule.checkpoint_folders.begin", refuse)
        with pytest.raises(CheckpointError) as caught:
            run.checkpoints.write_last(moment(25))
    rule = "s3: cannot be listed; the run is at its end, and its saved checkpoints cannot be listed now"
    assert str(caught.value) == rule
    assert caught.value.kind is (OutageError if type(error) is OutageError else CheckpointError)
    run.at(30)
    assert run.stored == [10, 30]


def test_a_later_step_is_not_the_best_by_the_metrics_of_one_that_could_not_be_written(start: Start) -> None:
    run = start(every_steps=0, keep_best="auc")
    run.role.has_room = False
    run.at(20, 0.8)
    assert len(run.said) == 1
    run.role.has_room = True
    run.checkpoints.write_if_due(moment(25, 0.8), is_evaluated=False)
    run.checkpoints.finish()
    assert run.role.held == [20]


def test_a_line_of_the_log_waits_for_the_room_that_a_checkpoint_has_taken(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.role.has_room = False
    run.role.may_write.clear()
    run.come_to(10)
    partial = run.folder.path / "checkpoints" / "step-00000010.partial"
    write = os.write

    def write_if_room(descriptor: int, content: memoryview) -> int:
        has_no_room = partial.exists()
        run.role.may_write.set()  # only now: what fails to write is soon removed
        if has_no_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    monkeypatch.setattr("workers.run_folder.append_only_file.os.write", write_if_room)
    assert eventually(partial.exists, PATIENCE_SECONDS)
    run.folder.log_evaluation(10, metrics_of(0.5, 0.5))
    assert len((run.folder.path / "metrics.jsonl").read_text().splitlines()) == 1
    assert len(run.said) == 1
    partial.mkdir()
    with pytest.raises(HybridError, match="No space left on device"):  # there is nothing to wait for
        run.folder.log_evaluation(20, metrics_of(0.5, 0.5))


def test_an_old_one_that_cannot_be_removed_is_said(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(keep_last=1)
    run.at(10)

    def refuse(folder: Path) -> None:
        raise CheckpointError(f"cannot write {folder}: Operation not permitted")

    monkeypatch.setattr("hybrid.checkpoint.checkpoint_folders.remove", refuse)
    run.at(20)
    assert run.stored == run.logged == [10, 20]
    (line,) = run.said
    assert line.startswith("an old checkpoint could not be removed: cannot write")


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (Checkpoints.write_last, "the run is at its end"),
        (partial(Checkpoints.write_last, is_stopped=True), "the run was asked to stop"),
    ],
    ids=["last", "stop"],
)
@pytest.mark.parametrize("steps", [(), (10,)], ids=["no other", "one before"])
def test_the_last_one_must_be_written(
    start: Start, steps: Sequence[int], write: Callable[[Checkpoints, Moment], None], why: str
) -> None:
    run = start()
    for step in steps:
        run.at(step)
    run.role.has_room = False
    saved = "only its state at step-00000010 is saved" if steps else "nothing of it is saved"
    message = f"^{NO_ROOM}; {why}, and {saved}$"
    with pytest.raises(CheckpointError, match=message):
        write(run.checkpoints, moment(15, 0.5))
    assert run.stored == list(steps)


def test_the_last_one_is_the_best_too_and_prunes(start: Start) -> None:
    run = start(keep_last=1)
    run.at(2, 0.8)
    run.checkpoints.write_last(moment(15, 0.9))
    assert run.stored == [15]
    progress = Checkpoint.open(step_folder(run.folder.path, 15)).manifest.progress
    assert progress["best"] == ["auc", 0.9, 15]


def progress_of(run: Run, step: int) -> dict[str, Any]:
    return Checkpoint.open(step_folder(run.folder.path, step)).manifest.progress


@pytest.mark.parametrize("owes", [True, False])
def test_that_of_a_stop_knows_the_best_so_far_and_what_is_owed(start: Start, owes: bool) -> None:
    run = start()
    run.at(2, 0.8)
    run.checkpoints.write_last(moment(15, 0.9, owes=owes), is_stopped=True)
    assert run.stored == [2, 15]
    assert progress_of(run, 15)["best"] == ["auc", 0.8, 2]  # 0.9 is of some step before
    assert progress_of(run, 15)["owes_evaluation"] == owes


@pytest.mark.parametrize("is_last", [True, False])
def test_one_that_was_stopped_at_may_become_the_best(start: Start, is_last: bool) -> None:
    run = start(keep_last=1)
    run.at(2, 0.8)
    run.checkpoints.write_last(moment(20, owes=True), is_stopped=True)
    again = start(progress_of(run, 20), keep_last=1)
    if is_last:
        again.checkpoints.write_last(moment(20, 0.9))
    else:
        again.at(20, 0.9)
    assert again.checkpoints.best == ("auc", 0.9, 20)
    assert (again.said, again.stored) == ([], [20])
    added = {"best": ["auc", 0.9, 20], "owes_evaluation": False}
    assert progress_of(again, 20) == progress_of(run, 20) | added
    assert Checkpoint.best_valid(again.folder.path, print).manifest.metrics["auc"] == 0.9
    again.at(30)
    assert (again.said, again.stored) == ([], [20, 30])


def test_an_evaluation_that_is_not_the_best_is_owed_no_more(start: Start) -> None:
    run = start()
    run.at(2, 0.8)
    run.checkpoints.write_last(moment(15, owes=True), is_stopped=True)
    again = start(progress_of(run, 15))
    again.at(15, 0.7)
    again.checkpoints.write_last(moment(15, 0.7), is_stopped=True)
    assert progress_of(again, 15)["best"] == ["auc", 0.8, 2]
    assert not progress_of(again, 15)["owes_evaluation"]
    assert again.logged == run.logged


def test_one_to_which_the_evaluation_cannot_be_added_stays(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.checkpoints.write_last(moment(20, owes=True), is_stopped=True)
    again = start(progress_of(run, 20))

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        again.at(20, 0.9)
        assert len(again.said) == 1
        assert again.said[0].startswith("no checkpoint of step 20: cannot write")
        with pytest.raises(CheckpointError, match="at its end, and only its state at step-00000020 is saved"):
            again.checkpoints.write_last(moment(20, 0.9))
    assert again.checkpoints.best is None
    assert progress_of(again, 20)["owes_evaluation"]


def test_what_is_no_matter_of_the_disk_ends_the_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()

    def lose(self: Saving) -> Manifest:
        raise ClusterError("worker 0 is gone")

    monkeypatch.setattr(Saving, "write", lose)
    run.come_to(10)
    with pytest.raises(ClusterError, match="worker 0 is gone"):
        run.checkpoints.finish()
