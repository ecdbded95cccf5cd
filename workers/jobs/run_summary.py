"""The outcome of a finished run: result, summary, and commands for the next steps of the user."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import Best
from hybrid.config.data_sections import TEST, VALIDATION
from hybrid.config.task_sections import main_metric, metric_title, shown_metrics
from hybrid.metrics import Metrics
from hybrid.storage.remote_path import StoragePath
from workers.console import format_number, unknown_fractions
from workers.controller.session import DatasetSession
from workers.jobs.checkpoint_schedule import RunProgress
from workers.run_folder.run_access import command_name

PATIENCE = "train.patience"  # this key can end a run before its last step


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
        return self.session.limit if self.progress.step == self.session.total_steps else PATIENCE

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
            PATIENCE: train.patience + 1,
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
            ended = shared if self._limit_key == PATIENCE else ""
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
