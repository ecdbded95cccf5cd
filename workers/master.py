"""The master: the only role with opinions. It prepares, creates, runs, watches and stops everything."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from hybrid import wire
from hybrid.checkpoint import Checkpoint
from hybrid.clock import PHASES
from hybrid.config import RunConfig
from hybrid.data.prepared import prepare
from hybrid.errors import ConfigError, first_line
from hybrid.metrics import Metrics
from hybrid.topology import MASTER, Topology
from hybrid.update import Staleness
from workers.bootstrap import announce_stop, join
from workers.compare import Comparison
from workers.failure import diagnose
from workers.listener import listen
from workers.own import OwnJob
from workers.paths import cache_folder, own_command
from workers.report import RunFolder
from workers.session import DatasetSession, metrics_of
from workers.task import CompareTask, OwnTask, Task, TrainTask
from workers.terminal import ProfileSummary, Progress, Summary, TerminalView, bad_row_lines
from workers.trainer import Report

_POLL_SECONDS = 0.05
_SPANS_SHOWN = 6  # of a profile, at the end of a run


def run(config: RunConfig, task: Task, listener: socket.socket | None = None) -> None:
    """The master process: run a task on its cluster, from start to end.

    Args:
        listener: the rendezvous socket, where the launcher has bound it already.

    Raises:
        HybridError: what went wrong first, in one line.
    """
    torch.set_num_threads(config.cluster.threads)
    job = _make_job(config, task)
    section = config.cluster
    with listener or listen(section.master_address, section.master_port) as bound, TerminalView() as view:
        # Reading the data and gathering the roles overlap; neither needs the other.
        data = _Preparation(config, view, is_wanted=not isinstance(task, OwnTask))
        with join(MASTER, config, bound) as cluster:
            try:
                job.run(cluster.topology, data.result, view)
            except (wire.RemoteError, wire.LostError) as error:
                cause = diagnose(cluster, error, job.doing)
                announce_stop(cluster, str(cause))
                raise cause from error
            except BaseException as error:
                interrupted = isinstance(error, KeyboardInterrupt)
                announce_stop(cluster, "interrupted" if interrupted else first_line(error))
                raise
            announce_stop(cluster)


class _Job(Protocol):
    """What a task comes to; ``doing`` says where in it a failure came."""

    doing: str

    def run(self, topology: Topology, data: Callable[[], Path], view: TerminalView) -> None:
        """Do it, on a cluster that is there.

        Args:
            data: gives the folder of the prepared data, once it is there.
        """
        ...


def _make_job(config: RunConfig, task: Task) -> _Job:
    if isinstance(task, TrainTask):
        return Job(config, task)
    if isinstance(task, CompareTask):
        return Comparison(config, task.steps)
    return OwnJob(config, task.function)


class _Preparation:
    """Prepares the data of a run in a thread that does not keep a process alive which fails meanwhile.

    The thread prints nothing itself: at the end of a process, one that holds stdout would abort it.
    """

    def __init__(self, config: RunConfig, view: TerminalView, is_wanted: bool) -> None:
        self._config = config
        self._view = view
        self._said: SimpleQueue[str] = SimpleQueue()
        self._folder: Future[Path] = Future()
        if is_wanted:
            threading.Thread(target=self._run, name="prepare", daemon=True).start()

    def result(self) -> Path:
        """The folder of the prepared data, once it is there; says meanwhile what is going on."""
        while not self._folder.done() or not self._said.empty():
            with suppress(Empty):
                self._view.status(self._said.get(timeout=_POLL_SECONDS))
        return self._folder.result()

    def _run(self) -> None:
        try:
            self._folder.set_result(prepare(self._config, cache_folder(self._config), self._said.put))
        except BaseException as error:  # raised where the result is asked for
            self._folder.set_exception(error)


class Job:
    """One run from its first step to its summary; nothing is written before the first.

    Attributes:
        doing: what is going on, to say where it failed.
    """

    def __init__(self, config: RunConfig, task: TrainTask) -> None:
        self.doing = "at start"
        self._config = config
        self._path = task.folder
        self._folder: RunFolder
        self._resume = None if task.resume is None else Checkpoint.open(task.resume)
        self._started_at = task.started_at
        self._seconds_to_first_step = math.nan
        self._step = 0
        self._samples_trained = 0
        self._skipped_steps = 0
        self._seconds_training = 0.0
        self._profile: ProfileSummary | None = None

    def run(self, topology: Topology, data: Callable[[], Path], view: TerminalView) -> None:
        """Train, evaluate, write the checkpoint and the report."""
        session = DatasetSession(topology, self._config, data())
        train = self._config.train
        for report in session.bad_rows:
            for line in bad_row_lines(report):
                view.note(line)
        self._start(session)
        more = {"train.epochs": train.epochs + 1, "train.max_steps": 2 * train.max_steps}[session.limit]
        with self._open_folder() as self._folder:
            metrics = self._train(session, view)
            self._finish(session, metrics, view, f"--set {session.limit}={more}")

    def _open_folder(self) -> RunFolder:
        if self._resume is None:
            return RunFolder.create(self._path, self._config)
        return RunFolder.reopen(self._path, self._config, self._step)

    def _train(self, session: DatasetSession, view: TerminalView) -> Metrics:
        per_epoch, total = session.steps_per_epoch, session.total_steps
        metrics: Metrics | None = None
        while self._step < total:
            self.doing = f"at step {self._step}"
            epoch, within = divmod(self._step, per_epoch)
            count = self._steps_to_next_stop(within, per_epoch, total)
            start = time.perf_counter()
            reports = session.train(epoch, within, count, self._step)
            seconds = time.perf_counter() - start
            self._note_skipped(reports, count, view)
            self._step += count
            staleness = None if self._config.train.update == "sync" else session.take_staleness()
            self._log(reports, seconds, epoch, total, staleness, view)
            if self._profile is None and session.recorded and self._step >= session.recorded.stop:
                self._profile = self._take_profile(session)
            if self._is_evaluation_due(within + count == per_epoch, total):
                metrics = self._evaluate(session, view)
        assert metrics is not None, "the last step is followed by an evaluation"
        return metrics

    def _take_profile(self, session: DatasetSession) -> ProfileSummary:
        profile = session.take_profile()
        folder = self._folder.write_profile(profile)
        return ProfileSummary(folder, profile.step_seconds, dict(profile.top(_SPANS_SHOWN)))

    def _note_skipped(self, reports: list[Report], count: int, view: TerminalView) -> None:
        skipped = reports[0].skipped_steps  # the same on every trainer
        self._skipped_steps += skipped
        if skipped:
            view.note(
                f"steps {self._step} to {self._step + count - 1}: {skipped} skipped, "
                "since a loss or gradient was not finite"
            )

    def _start(self, session: DatasetSession) -> None:
        if self._resume is None:
            return
        step = self._resume.manifest.step
        if step >= session.total_steps:
            rule = f"the run has taken all {session.total_steps} steps; raise it to go on"
            raise ConfigError(session.limit, rule)
        session.load(self._resume)
        self._step = step

    def _steps_to_next_stop(self, within: int, per_epoch: int, total: int) -> int:
        """Steps until something is to be logged or evaluated, or the epoch or the run ends."""
        train = self._config.train
        if not self._samples_trained:
            return 1  # shows at once that the run is alive
        stops = [
            train.log_every_steps - self._step % train.log_every_steps,
            per_epoch - within,
            total - self._step,
        ]
        if train.eval_every_steps:
            stops.append(train.eval_every_steps - self._step % train.eval_every_steps)
        return min(stops)

    def _is_evaluation_due(self, epoch_ends: bool, total: int) -> bool:
        every = self._config.train.eval_every_steps
        return self._step == total or (self._step % every == 0 if every else epoch_ends)

    def _log(
        self,
        reports: list[Report],
        seconds: float,
        epoch: int,
        total: int,
        staleness: Staleness | None,
        view: TerminalView,
    ) -> None:
        samples = sum(len(r.labels) for r in reports)
        if not self._samples_trained:
            self._seconds_to_first_step = time.time() - self._started_at
        self._samples_trained += samples
        self._seconds_training += seconds
        steps = len(reports[0].losses)
        progress = Progress(
            step=self._step,
            total_steps=total,
            epoch=epoch + 1,
            epochs=self._config.train.epochs,
            loss=sum(sum(r.losses) for r in reports) / steps,
            auc=metrics_of(reports).auc,
            samples_per_second=samples / seconds,
            seconds_left=(total - self._step) * seconds / steps,
            phase_seconds={p: sum(r.phase_seconds[p] for r in reports) / len(reports) for p in PHASES},
            staleness=staleness,
        )
        self._folder.log_progress(progress)
        view.progress(progress)

    def _evaluate(self, session: DatasetSession, view: TerminalView) -> Metrics:
        self.doing = f"while evaluating after step {self._step}"
        view.status("evaluating")
        metrics = session.evaluate(self._step)
        self._folder.log_evaluation(self._step, metrics)
        view.evaluation(self._step, metrics)
        return metrics

    def _finish(self, session: DatasetSession, metrics: Metrics, view: TerminalView, more: str) -> None:
        self.doing = "while writing the checkpoint"
        view.status("writing the checkpoint")
        epochs_done = self._step // session.steps_per_epoch
        path = self._folder.path / "checkpoints" / f"step-{self._step:08d}"
        session.save(path, self._step, epochs_done, metrics)
        session.close()
        rate = self._samples_trained / self._seconds_training
        result = {
            **metrics.as_dict(),
            "best_auc": session.best_auc,
            "bad_rows": sum(report.total for report in session.bad_rows),
            "steps": self._step,
            "skipped_steps": self._skipped_steps,
            "samples_per_second": rate,
            "seconds_to_first_step": self._seconds_to_first_step,
        }
        self._folder.finish(result)
        run_folder = self._folder.path
        view.summary(
            Summary(
                metrics=metrics,
                best_auc=session.best_auc,
                samples_per_second=rate,
                run_folder=run_folder,
                curves=self._folder.curves,
                resume=f"{own_command()} launch --resume {run_folder} {more}",
                evaluate=f"{own_command()} evaluate {run_folder}",
                predict=f"{own_command()} predict {run_folder} --output FILE",
                profile=self._profile,
            )
        )
