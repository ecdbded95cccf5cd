"""A training run on the master: steps, evaluations, log, checkpoints and results."""

import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import PROGRESS_FILE, Best
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.config.data_sections import TEST, VALIDATION
from hybrid.config.task_sections import main_metric, metric_title, shown_metrics
from hybrid.errors import ConfigError, DataError, StorageError
from hybrid.loggers.run_loggers import RunLoggers
from hybrid.metrics import Metrics, Predictions, ProgressiveMetrics
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Topology
from workers.cluster_task import TrainTask
from workers.console import TerminalView, TrainingProgress, data_notes, format_number, unknown_fractions
from workers.controller.session import DatasetSession
from workers.controller.stream_session import open_session
from workers.exit_codes import ExitCode, StopRequest
from workers.jobs.checkpoint_schedule import Checkpoints, Interval, RunProgress
from workers.run_folder.run_access import RESULT_FILE, UNKNOWN_FRACTION, checkpoint_root, command_name
from workers.run_folder.run_files import RunFolder

# Approximate duration of a call to the trainers. A requested stop waits for the end of the call.
CALL_SECONDS = 1.0
_PATIENCE = "train.patience"  # this key can end a run before its last step
_SECOND_CTRL_C = "; a second Ctrl-C stops at once"


@dataclass(frozen=True)
class Outcome:
    """The progress, metrics and best evaluation of a finished run."""

    session: DatasetSession
    progress: RunProgress
    # The step and the metrics of the model on the test rows; None without test rows.
    tested: tuple[int, Metrics] | None
    validation: Metrics | None  # the metrics of the last step on the validation rows, if there are such rows
    best: Best | None

    @property
    def _limit_key(self) -> str:
        """The configuration key whose limit ended the run."""
        return self.session.limit if self.progress.step == self.session.total_steps else _PATIENCE

    @property
    def result(self) -> dict[str, Any]:
        """The content of result.json."""
        step, metrics = self.tested or (None, {})
        return {
            **metrics,
            "tested_step": step,
            "validation": self.validation,
            "best": self.best and {"step": self.best.step, self.best.metric: self.best.value},
            "best_reachable_auc": self.session.best_auc,
            "bad_rows": sum(report.bad_rows.total for report in self.session.reports.values()),
            "unknown_values": {column.name: column.fraction for column in self.session.reports[TEST].unknown},
            "steps": self.progress.step,
            "skipped_steps": self.progress.skipped_steps,
            "samples_per_second": self.progress.samples / self.progress.seconds,
            "tables": self.session.placement.describe_tables(),
        }

    def commands(self, run: StoragePath) -> dict[str, str]:
        """Return the commands that resume, evaluate and use the run, by label."""
        train = self.session.config.train
        raised_limits = {
            "train.epochs": train.epochs + 1,
            "train.max_steps": 2 * train.max_steps,
            _PATIENCE: train.patience + 1,
        }
        # A stream that has ended needs no higher limit: it continues with new units.
        key = self._limit_key
        raised = f" --set {key}={raised_limits[key]}" if key in raised_limits else ""
        quoted = shlex.quote(str(run))  # a URL may have characters that a shell interprets
        rows = " --input FILE" if self.tested is None else ""
        return {
            "resume": f"{command_name()} launch --resume {quoted}{raised}",
            "evaluate": f"{command_name()} evaluate {quoted}{rows}",
            "predict": f"{command_name()} predict {quoted}{rows} --output FILE",
        }

    def describe(self, run: StoragePath) -> dict[str, str]:
        """Return the results for the summary, by label."""
        tasks, results = self.session.config.all_tasks, {}
        score = main_metric(tasks)
        note = "; the same test rows chose the step (see data.validation)"
        shared = "" if VALIDATION in self.session.reports else note
        if self.tested is None:
            if not self.session.config.data.is_stream:  # the units of a stream have lines of their own
                results[f"test {metric_title(score)}"] = "none: there are no test rows"
        else:
            step, metrics = self.tested
            best_auc = self.session.best_auc
            reachable = "" if best_auc is None else f" (best reachable {format_number(best_auc)})"
            ended = shared if self._limit_key == _PATIENCE else ""
            value = f"{format_number(metrics[score])} at step {step:,}{reachable}{ended}"
            results[f"test {metric_title(score)}"] = value
            names = [name for name in shown_metrics(tasks) if name != score]
            results |= {metric_title(name): format_number(metrics[name]) for name in names}
        if self.validation is not None:
            value = f"{format_number(self.validation[score])} at step {self.progress.step:,}"
            results[f"validation {metric_title(score)}"] = value
        earlier = None if self.best is None or self.best.step == self.progress.step else self.best
        if earlier:
            value = f"{format_number(earlier.value)} at step {earlier.step:,}{shared}"
            of_rows = "" if shared else "validation "
            results[f"best {of_rows}{metric_title(earlier.metric)}"] = value
        unknown = self.session.reports[TEST].unknown
        if unknown:
            results["unknown values"] = unknown_fractions(unknown)
        results["throughput"] = f"{self.progress.samples / self.progress.seconds:,.0f} samples/s"
        results["run folder"] = str(run)
        last = str(checkpoint_folders.step_folder(run, self.progress.step))
        if earlier:
            results["last checkpoint"] = f"{last} (resume starts here)"
            folder = checkpoint_folders.step_folder(run, earlier.step)
            results["best checkpoint"] = f"{folder} (evaluate and predict use it)"
        else:
            results["checkpoint"] = last
        return results


class Training:
    """A job that trains, from step 0 or from a checkpoint, until the run ends or a stop is requested.

    The job writes into the run folder only after all roles have their tables and nets.

    Attributes:
        doing: current activity, for error messages.
    """

    def __init__(self, config: RunConfig, task: TrainTask) -> None:
        self.doing = "at start"
        self._config = config
        self._tasks = config.all_tasks
        self._task = task
        self._run = checkpoint_root(task.folder)
        self._folder: RunFolder
        self._checkpoints: Checkpoints
        self._seconds_to_first_step = math.nan
        self._is_binary = next(iter(self._tasks.values())).kind == "binary"
        self._now = RunProgress()  # its metrics are of the selection split
        self._selection = config.data.selection_split
        self._tested: tuple[int, Metrics] | None = None  # the step and the metrics of the result
        self._profile: Path | None = None
        self._patience_start = 0
        self._seconds_per_step = CALL_SECONDS
        self._stop = StopRequest(config.cluster.timeout_seconds)
        self._is_stop_announced = False

    def run(self, topology: Topology, data: Callable[[], StoragePath], view: TerminalView) -> ExitCode:
        """Train, evaluate, and write checkpoints and results; ConfigError if a resumed run has finished.

        Return DONE, or the exit code of a requested stop.
        """
        loggers = RunLoggers(self._config, view.warn)
        stored = self._find_checkpoint(view)
        session = open_session(topology, self._config, stored, data, view)
        for line in [*session.describe_model(), *(session.initial.notes if session.initial else ())]:
            view.note(line)
        view.note(f"run folder {self._run}; Ctrl-C saves a checkpoint and stops{_SECOND_CTRL_C}")
        for report in session.reports.values():
            for line in data_notes(report):
                view.warn(line)
        if not (session.has_rows(self._selection) or self._config.data.is_stream):
            view.note("no test rows (data.split = none): nothing is evaluated")
        best = None if stored is None else self._resume(session, stored, view)
        step = None
        if self._task.resume:
            step = self._now.step
            checkpoint_folders.remove_after(self._run, step)
        unit = session.unit.name if session.unit else ""
        is_evaluated = not self._now.owes_evaluation
        opened = RunFolder(self._task.folder, self._config, step, is_evaluated, unit, loggers)
        with opened as self._folder, self._stop.handling_signals():
            section = dataclasses.replace(self._config.checkpoint, keep_best=self._config.best_by)
            unknown = {each.name + UNKNOWN_FRACTION: each.fraction for each in session.reports[TEST].unknown}
            if unknown and self._now.step == 0:
                self._folder.log("unknown", self._now.step, unknown)
            self._checkpoints = Checkpoints(session, self._folder, section, view.warn, best, self._now.step)
            self._train(session, view)
            if not self._is_over(session):
                self.doing = "while writing the checkpoint"
                session.meanwhile = lambda: None  # the next line already announces the stop
                view.status(f"saving step {self._now.step}{_SECOND_CTRL_C}")
                self._checkpoints.write_last(self._now, is_stopped=True)
                return self._end_stopped(session)
            # A run that was killed between its last checkpoint and its end takes no step.
            if self._now.metrics is None and session.has_rows(self._selection):
                self._now.metrics = session.evaluate(self._now.step, self._selection)
            return self._finish(session, view)

    def _find_checkpoint(self, view: TerminalView) -> Checkpoint | None:
        """Return the newest valid checkpoint of a resumed run; None for a run without checkpoints."""
        if not self._task.resume:
            return None
        if not checkpoint_folders.list_checkpoints(self._run):
            view.note(f"{self._run} has no checkpoint: starting from the beginning")
            return None
        self.doing = "while reading the checkpoint"
        view.status("reading the checkpoint")
        return Checkpoint.newest_valid(self._run, view.warn)

    def _resume(self, session: DatasetSession, checkpoint: Checkpoint, view: TerminalView) -> Best | None:
        """Load a checkpoint; return its best evaluation, if any. ConfigError if the run has finished."""
        step, total = checkpoint.manifest.step, session.total_steps
        if step > total or (step == total and (self._task.folder / RESULT_FILE).exists()):
            rule = f"the run has taken all {total} steps; raise it to continue"
            raise ConfigError(session.limit, rule)
        has_reports = PROGRESS_FILE in checkpoint.manifest.files
        tensors = checkpoint.tensors(PROGRESS_FILE) if has_reports else {}
        self._now = RunProgress.unpack(step, checkpoint.manifest.progress, tensors)
        best = checkpoint.manifest.best
        if best is None or best.metric != self._config.best_by:
            # Evaluations of the run do not count if another metric selected the best of them.
            best, self._patience_start = None, step - self._now.owes_evaluation
        if self._has_lost_patience(session, best) and (self._task.folder / RESULT_FILE).exists():
            by = metric_title(self._config.best_by)
            rule = f"the run ended without a better {by}; raise it to continue"
            raise ConfigError(_PATIENCE, rule, self._config.train.patience)
        session.load(checkpoint)
        view.note(f"resuming from step {step}: {checkpoint.folder}")
        if step < total and checkpoint.manifest.metrics:
            self._now.metrics = checkpoint.manifest.metrics
        return best

    def _train(self, session: DatasetSession, view: TerminalView) -> None:
        while not self._is_over(session) and not self._stop.is_requested:
            try:
                is_waiting = not (self._now.owes_evaluation or session.is_ready(self._now.step))
            except (DataError, StorageError):  # of the master: the trainers are between two steps
                self._checkpoints.write_last(self._now, is_stopped=True)
                raise
            if not (self._now.owes_evaluation or is_waiting):
                self._take_steps(session, view)
            self._checkpoints.poll()
            self._log_ended_unit(session, view)
            metrics = None
            if self._now.owes_evaluation:
                metrics = self._evaluate(session, view, self._selection, self._now.step)
            if metrics is not None:
                self._now.metrics, self._now.owes_evaluation = metrics, False
                if math.isnan(metrics.get(self._config.best_by, 0.0)):
                    self._now.undefined.append(self._now.step)
            if self._now.step < session.total_steps and not self._now.owes_evaluation:
                self._checkpoints.write_if_due(self._now, metrics is not None, is_waiting)
            if metrics and not self._is_over(session):  # the summary shows the last evaluation
                shown = {name: metrics[name] for name in shown_metrics(self._tasks)}
                view.evaluation(self._selection, self._now.step, shown)
        if self._now.step < session.total_steps and self._is_over(session):
            without = f"{self._config.train.patience} evaluation(s) without a better"
            view.note(f"ended at step {self._now.step}: {without} {metric_title(self._config.best_by)}")

    def _is_over(self, session: DatasetSession) -> bool:
        if self._now.owes_evaluation:
            return False
        best = self._checkpoints.expected_best
        return self._now.step >= session.total_steps or self._has_lost_patience(session, best)

    def _has_lost_patience(self, session: DatasetSession, best: Best | None) -> bool:
        train, per_epoch = self._config.train, session.steps_per_epoch
        return self._now.has_lost_patience(train, per_epoch, best, self._patience_start)

    def _take_steps(self, session: DatasetSession, view: TerminalView) -> None:
        per_epoch, total = session.steps_per_epoch, session.total_steps
        self.doing = f"at step {self._now.step}"
        unit = session.unit.name if session.unit else ""
        epoch, within = divmod(self._now.step, per_epoch)
        count = self._steps_of_next_call(within, per_epoch, total)
        self._announce_stop(session, view, self._now.step + count)
        start = time.perf_counter()
        reports = session.train(self._now.step, count)
        seconds = time.perf_counter() - start
        count = len(reports[0].losses)  # the unit of a stream may end earlier
        self._announce_stop(session, view, self._now.step + count)
        if not count:
            return
        self._seconds_per_step = seconds / count
        if math.isnan(self._seconds_to_first_step):
            self._seconds_to_first_step = time.time() - self._task.started_at
        skipped = reports[0].skipped_steps
        if skipped:  # the same on every trainer
            steps = f"steps {self._now.step} to {self._now.step + count - 1}"
            view.warn(f"{steps}: {skipped} skipped, since a loss or gradient was not finite")
        in_unit = bool(unit) and self._is_binary
        self._now.add(reports, seconds, in_unit=in_unit)
        epoch_ends = within + count == per_epoch
        every = self._config.train.eval_every_steps
        is_due = self._now.step == total or (self._now.step % every == 0 if every else epoch_ends)
        self._now.owes_evaluation = session.has_rows(self._selection) and is_due
        is_line_due = self._now.step == 1 or self._now.step % self._config.train.log_every_steps == 0
        if self._now.owes_evaluation or epoch_ends or is_line_due:
            interval = self._now.interval
            self._now.interval = Interval()
            numbers = session.table_metrics() | session.learning_rates(self._now.step)
            if in_unit:
                numbers |= {f"progressive_{k}": v for k, v in interval.progressive_metrics().items()}
            progress = TrainingProgress(
                step=self._now.step,
                total_steps=total if total < sys.maxsize else 0,
                epoch=epoch + 1,
                epochs=self._config.train.epochs,
                loss=interval.loss,
                score_name=main_metric(self._tasks),
                score=interval.score(next(iter(self._tasks.values()))),
                samples_per_second=interval.num_samples / interval.seconds,
                seconds_left=(total - self._now.step) * interval.seconds / interval.num_steps,
                phase_seconds=interval.phase_seconds,
                numbers=numbers,
                unit=unit,
            )
            self._folder.log_progress(progress)
            view.progress(progress)
        if self._profile is None and session.recorded and self._now.step >= session.recorded.stop:
            self._profile = self._folder.write_profile(session.take_profile())

    def _log_ended_unit(self, session: DatasetSession, view: TerminalView) -> None:
        name = session.ended_unit
        session.ended_unit = ""
        if not name or not self._is_binary:
            return
        metrics = self._now.unit.metrics()
        self._now.unit = ProgressiveMetrics()
        self._folder.log("unit", self._now.step, metrics, unit=name)
        shown = {name: metrics[name] for name in ("auc", "log_loss", "calibration")}
        view.evaluation(name, self._now.step, shown)

    def _announce_stop(self, session: DatasetSession, view: TerminalView, step: int) -> None:
        """Make the session announce a requested stop while it waits: the run stops after ``step``."""

        def announce() -> None:
            if self._stop.is_requested and not self._is_stop_announced:
                self._is_stop_announced = True
                view.status(f"stopping after step {step}{_SECOND_CTRL_C}")

        session.meanwhile = announce

    def _steps_of_next_call(self, within: int, per_epoch: int, total: int) -> int:
        """Return the number of steps of the next call, which follows ``within`` steps of the epoch.

        A call ends after about a second, or earlier at a log line, evaluation, checkpoint or end of an epoch.
        """
        train = self._config.train
        if math.isnan(self._seconds_to_first_step):
            return 1  # the first log line appears as soon as possible
        periods = train.log_every_steps, train.eval_every_steps
        limits = [
            *(each - self._now.step % each for each in periods if each),
            per_epoch - within,
            total - self._now.step,
            max(1, int(CALL_SECONDS / self._seconds_per_step)),
            self._checkpoints.steps_to_next(self._now.step),
        ]
        return int(min(limits))

    def _evaluate(self, session: DatasetSession, view: TerminalView, split: str, step: int) -> Metrics | None:
        """Return the metrics after ``step``; None if a stop is requested before the end of the evaluation."""
        self.doing = f"while evaluating after step {step}"
        view.status("evaluating")
        self._announce_stop(session, view, self._now.step)
        predictions: list[Predictions] = []
        for chunk in session.evaluation(step, split):
            if self._stop.is_requested:
                return None
            predictions += chunk
        metrics = session.metrics(predictions)
        self._folder.log(split, step, metrics)
        return metrics

    def _test(self, session: DatasetSession, view: TerminalView) -> bool:
        """Record the test metrics; evaluate if there are none. Return False if a stop interrupts this."""
        if self._selection == TEST or not session.has_rows(TEST):
            self._tested = None if self._now.metrics is None else (self._now.step, self._now.metrics)
            return True
        best, step = self._checkpoints.best, self._now.step
        if best is not None and best.step != step:
            self.doing = "while reading the best checkpoint"
            view.status("reading the best checkpoint")
            step = best.step
            session.restore(Checkpoint.open(checkpoint_folders.step_folder(self._run, step)))
        metrics = self._evaluate(session, view, TEST, step)
        self._tested = None if metrics is None else (step, metrics)
        return metrics is not None

    def _end_stopped(self, session: DatasetSession) -> ExitCode:
        session.close()
        self._folder.write_report({"tables": session.placement.describe_tables()})
        return self._stop.code

    def _finish(self, session: DatasetSession, view: TerminalView) -> ExitCode:
        self.doing = "while writing the checkpoint"
        view.status("writing the checkpoint")
        self._checkpoints.write_last(self._now)
        if not self._test(session, view):
            return self._end_stopped(session)
        session.close()
        validation = None if self._selection == TEST else self._now.metrics
        best = self._checkpoints.best
        outcome = Outcome(session, self._now, self._tested, validation, best)
        seconds = {"seconds_to_first_step": self._seconds_to_first_step}
        self._folder.finish({**outcome.result, **seconds})
        files = {"report": str(self._folder.report)}
        if self._profile is not None:
            files["profile"] = str(self._profile)
        view.summary(outcome.describe(self._run) | files, outcome.commands(self._run))
        return ExitCode.DONE
