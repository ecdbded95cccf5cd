"""Runs on a cluster of a test that are stopped or interrupted, and the records that they leave."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from support.cluster import CASE_SECONDS
from support.commands import eventually
from support.jobs import prepared_in
from support.shards import PATIENCE_SECONDS

from hybrid.checkpoint.checkpoint_folders import Manifest, list_checkpoints, parse_step, step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.metrics import Predictions
from hybrid.storage.remote_path import StoragePath
from workers.cluster_task import TrainTask
from workers.console import TerminalView, TrainingProgress
from workers.controller.deployment import HeldCheckpoint
from workers.controller.remote_trainer import TrainerReport
from workers.controller.session import DatasetSession
from workers.exit_codes import STOP_REQUEST, ExitCode
from workers.jobs import training_job
from workers.rendezvous.bootstrap import JoinedCluster
from workers.run_folder.run_access import checkpoint_root

_TIMED = ("time", "samples_per_second", "phase_seconds")
_SAVED = ("checkpoint", "delta")


class InterruptedRunError(Exception):
    """Stands for a kill of the run."""


class View(TerminalView):
    """A console without output that collects notes, and interrupts the run at a line of progress.

    Args:
        last_step: step of that line; 0 for the end of the run.
        saved_step: step of a checkpoint that must exist then.
    """

    def __init__(self, run: Path, last_step: int = 0, saved_step: int = 0) -> None:
        super().__init__(Console(file=open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115
        self.notes: list[str] = []
        self.statuses: list[str] = []
        self._run = run
        self._last_step = last_step
        self._saved_step = saved_step

    def note(self, text: str) -> None:
        if not re.match(r"dense net |\d+ embedding table|run folder |batch normalization ", text):
            self.notes.append(text)

    def warn(self, text: str) -> None:
        self.note(text)

    def status(self, text: str) -> None:
        self.statuses.append(text)

    def progress(self, progress: TrainingProgress) -> None:
        if progress.step == self._last_step:
            root = checkpoint_root(self._run)
            saved = step_folder(root, self._saved_step)
            assert eventually(lambda: saved in list_checkpoints(root), PATIENCE_SECONDS)
            raise InterruptedRunError


class StoppedSession(DatasetSession):
    """A session whose run receives a request to stop.

    Attributes:
        moment: activity and step of the request.
        calls: number of steps of each call of the trainers.
    """

    moment = ("", 0)
    calls: list[int]

    def train(self, steps_before: int, num_steps: int) -> list[TrainerReport]:
        self.calls.append(num_steps)
        if self.moment[0] == "training" and steps_before <= self.moment[1] < steps_before + num_steps:
            signal.raise_signal(STOP_REQUEST)
        return super().train(steps_before, num_steps)

    def evaluation(self, steps_before: int, split: str) -> Iterator[list[Predictions]]:
        activity = "evaluating" if split == self.config.data.selection_split else "testing"
        self._stop_at(activity, steps_before)
        yield from super().evaluation(steps_before, split)
        self._stop_at(f"done {activity}", steps_before)

    def begin_save(self, folder: StoragePath, manifest: Manifest, *args: Any) -> HeldCheckpoint:
        self._stop_at("saving", manifest.step)
        return super().begin_save(folder, manifest, *args)

    def _stop_at(self, activity: str, step: int) -> None:
        if self.moment == (activity, step):
            self.moment = ("", 0)  # once
            signal.raise_signal(STOP_REQUEST)


def _run(
    cluster: JoinedCluster,
    config: RunConfig,
    cache: StoragePath,
    task: TrainTask,
    view: View,
    moment: tuple[str, int] = ("", 0),
    call_seconds: float | None = None,
) -> tuple[ExitCode | None, list[int]]:
    """Run a task; return its code, None if it is interrupted, and the steps of each call of the trainers."""
    sessions: list[StoppedSession] = []

    def make(*args: Any, **keywords: Any) -> StoppedSession:
        sessions.append(StoppedSession(*args, **keywords))
        sessions[-1].moment, sessions[-1].calls = moment, []
        return sessions[-1]

    job = "workers.jobs.training_job"
    seconds = training_job.CALL_SECONDS if call_seconds is None else call_seconds
    code = None
    session = "workers.controller.stream_session.DatasetSession"
    with view, patch(session, make), patch(f"{job}.CALL_SECONDS", seconds):
        try:
            code = training_job.Training(config, task).run(
                cluster.topology, lambda: prepared_in(config, cache), view
            )
        except InterruptedRunError:
            sessions[-1].close()
    return code, sessions[-1].calls


def train(
    cluster: JoinedCluster,
    config: RunConfig,
    cache: StoragePath,
    run: Path,
    resume: bool = False,
    last_step: int = 0,
    saved_step: int = 0,
) -> list[str]:
    """Train in a run folder, to the end or as far as :class:`View` allows; return the notes."""
    view = View(run, last_step, saved_step)
    _run(cluster, config, cache, TrainTask(run, resume, time.time()), view)
    return view.notes


def stop(
    cluster: JoinedCluster, config: RunConfig, cache: StoragePath, run: Path, moment: tuple[str, int]
) -> tuple[ExitCode | None, list[str]]:
    """Train in a run folder until the run is requested to stop; return its code and its status lines."""
    view = View(run)
    signal.signal(STOP_REQUEST, signal.default_int_handler)
    # A call lasts until an evaluation or a checkpoint is due, also on a slow machine.
    code, _ = _run(cluster, config, cache, TrainTask(run, False, time.time()), view, moment, CASE_SECONDS)
    return code, view.statuses


def calls_of(
    cluster: JoinedCluster, config: RunConfig, cache: StoragePath, run: Path, last_step: int, saved_step: int
) -> list[int]:
    """Train with short calls as far as :class:`View` allows; return the number of steps of each call."""
    task, view = TrainTask(run, False, time.time()), View(run, last_step, saved_step)
    return _run(cluster, config, cache, task, view, call_seconds=1e-9)[1]


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl on training, without times."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in r.items() if k not in _TIMED} for r in records if r["kind"] not in _SAVED]


def checksums(folder: StoragePath) -> dict[str, str]:
    """Return the checksums of all files of tensors in a checkpoint."""
    files = Checkpoint.open(folder).manifest.files
    return {name: sha256 for name, (_, sha256) in files.items() if name.endswith(".safetensors")}


def saved_steps(run: StoragePath) -> list[int]:
    """Return the steps of the checkpoints of a run, the newest first."""
    return [parse_step(folder) for folder in list_checkpoints(run)]


def assert_same_run(run: Path, whole: Path) -> None:
    """Check that two runs have the same log and the same last checkpoint."""
    assert lines(run) == lines(whole)
    last = saved_steps(whole)[0]
    assert checksums(step_folder(run, last)) == checksums(step_folder(whole, last))
