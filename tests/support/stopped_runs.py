"""Runs on a cluster of a test that are stopped in their midst, and what they leave behind."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from support.cluster import CASE_SECONDS
from support.commands import eventually
from support.shards import PATIENCE_SECONDS

from hybrid.checkpoint.checkpoint_folders import list_checkpoints, step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.data.prepare.dataset_location import ensure_prepared
from hybrid.metrics import Predictions
from hybrid.protocol.update_rules import Staleness
from hybrid.storage.remote_path import StoragePath
from workers.cluster_task import TrainTask
from workers.console.terminal import TerminalView, TrainingProgress
from workers.controller.deployment import Saving
from workers.controller.remote_trainer import TrainerReport
from workers.controller.session import DatasetSession
from workers.controller.shared_folders import SharedFolders
from workers.exit_codes import ExitCode
from workers.jobs.training_job import Training
from workers.rendezvous.bootstrap import JoinedCluster
from workers.run_folder.run_access import checkpoint_root
from workers.signals import STOP_REQUEST

_TIMED = ("time", "samples_per_second", "phase_seconds")


class InterruptedRunError(Exception):
    """Stands for what kills a run."""


class View(TerminalView):
    """A screen that nobody sees, which ends the run at a line of progress.

    Args:
        last_step: of that line; 0 for the end of the run.
        saved_step: a checkpoint that is to be there then.
    """

    def __init__(self, run: Path, last_step: int = 0, saved_step: int = 0) -> None:
        super().__init__(Console(file=open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115
        self.notes: list[str] = []
        self.statuses: list[str] = []
        self._run = run
        self._last_step = last_step
        self._saved_step = saved_step

    def note(self, text: str) -> None:
        of_every_run = r"dense net |\d+ embedding table|run folder |batch normalization "
        if not re.match(of_every_run, text):
            self.notes.append(text)

    def warn(self, text: str) -> None:
        self.note(text)

    def status(self, text: str) -> None:
        self.statuses.append(text)

    def progress(self, progress: TrainingProgress) -> None:
        if progress.step == self._last_step:
            there = checkpoint_root(self._run)
            saved = step_folder(there, self._saved_step)
            assert eventually(lambda: saved in list_checkpoints(there), PATIENCE_SECONDS)
            raise InterruptedRunError


class Asking(DatasetSession):
    """A session in the midst of which its run is asked to stop.

    Attributes:
        moment: while it trains, evaluates, counts or saves, and at or after which step.
        calls: how many steps trainers were to take at a time.
    """

    moment = ("", 0)
    calls: list[int]

    def train(self, epoch: int, first_step: int, num_steps: int, steps_before: int) -> list[TrainerReport]:
        self.calls.append(num_steps)
        if self.moment[0] == "training" and steps_before <= self.moment[1] < steps_before + num_steps:
            signal.raise_signal(STOP_REQUEST)
        return super().train(epoch, first_step, num_steps, steps_before)

    def evaluation(self, steps_before: int) -> Iterator[list[Predictions]]:
        if self.moment == ("evaluating", steps_before):
            signal.raise_signal(STOP_REQUEST)
        yield from super().evaluation(steps_before)
        if self.moment == ("done evaluating", steps_before):
            signal.raise_signal(STOP_REQUEST)

    def take_staleness(self, step: int) -> Staleness:
        self._ask_if_it_is(("counting staleness", step))
        return super().take_staleness(step)

    def begin_save(self, folder: StoragePath, step: int, *args: Any) -> Saving:
        self._ask_if_it_is(("saving", step))
        return super().begin_save(folder, step, *args)

    def _ask_if_it_is(self, moment: tuple[str, int]) -> None:
        if self.moment == moment:
            self.moment = ("", 0)  # it may come again
            signal.raise_signal(STOP_REQUEST)


@contextmanager
def sessions_closed(moment: tuple[str, int]) -> Iterator[list[Asking]]:
    """Close what a run that does not come to its end has left on the cluster."""
    made: list[Asking] = []

    def make(*args: Any) -> Asking:
        made.append(Asking(*args))
        made[-1].moment, made[-1].calls = moment, []
        return made[-1]

    with patch("workers.jobs.training_job.DatasetSession", make):
        try:
            yield made
        except InterruptedRunError:
            made[-1].close()


def train(
    cluster: JoinedCluster,
    config: RunConfig,
    cache: StoragePath,
    run: Path,
    resume: bool = False,
    last_step: int = 0,
    saved_step: int = 0,
) -> list[str]:
    """Train in a run folder, to the end or as far as :class:`View` says; the notes."""
    view = View(run, last_step, saved_step)
    with view, sessions_closed(("", 0)):
        task = TrainTask(run, resume, time.time())
        Training(config, task).run(
            cluster.topology, lambda: ensure_prepared(config, cache), view, SharedFolders([])
        )
    return view.notes


def stop(
    cluster: JoinedCluster, config: RunConfig, cache: StoragePath, run: Path, moment: tuple[str, int]
) -> tuple[ExitCode, list[str]]:
    """Train in a run folder until the run is asked to stop: whether it came to its end, and what it said."""
    view = View(run)
    signal.signal(STOP_REQUEST, signal.default_int_handler)
    # However slow the machine is, a call goes as far as the next thing that is due.
    with view, sessions_closed(moment), patch("workers.jobs.training_job.CALL_SECONDS", CASE_SECONDS):
        training = Training(config, TrainTask(run, False, time.time()))
        return training.run(
            cluster.topology, lambda: ensure_prepared(config, cache), view, SharedFolders([])
        ), view.statuses


def calls_of(
    cluster: JoinedCluster, config: RunConfig, cache: StoragePath, run: Path, seconds: float
) -> list[int]:
    """Train where a call of the trainers is to take so long; the steps of each call."""
    view = View(run)
    with (
        view,
        sessions_closed(("", 0)) as sessions,
        patch("workers.jobs.training_job.CALL_SECONDS", seconds),
    ):
        training = Training(config, TrainTask(run, False, time.time()))
        has_ended = training.run(
            cluster.topology, lambda: ensure_prepared(config, cache), view, SharedFolders([])
        )
        assert has_ended is ExitCode.DONE
        return sessions[0].calls


def lines(run: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of training, without what depends on the clock."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in r.items() if k not in _TIMED} for r in records if r["kind"] != "checkpoint"]


def checksums(folder: Path) -> dict[str, str]:
    """Of all tensors of a checkpoint."""
    files = Checkpoint.open(folder).manifest.files
    return {name: sha256 for name, (_, sha256) in files.items() if name.endswith(".safetensors")}
