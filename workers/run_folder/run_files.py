"""Writing the files of a run folder."""

import os
import platform
import socket
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import hybrid
from hybrid.config import RunConfig
from hybrid.config.data_sections import TEST
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.loggers.record_file import METRICS_FILE, AppendOnlyFile, read_records, write_records
from hybrid.loggers.run_loggers import FAILED_SECONDS, RunLoggers
from hybrid.storage import files
from hybrid.storage.file_formats import parse_json, replace_non_finite
from hybrid.storage.private_files import make_folder
from hybrid.user_code.run_signature import signed_toml
from workers.console import TrainingProgress, json_text, print_line
from workers.run_folder import run_access
from workers.run_folder.run_access import RESULT_FILE, run_write_errors
from workers.run_folder.run_report import ReportedRun, report_page
from workers.run_folder.step_profile import Profile

_STOP_SECONDS = 20.0  # time limit of the last calls of loggers, if a stop is requested


class RunFolder:
    """The files of one run, closed by ``close`` or a ``with`` block.

    The folder of a resumed run may be missing. A resume removes the result, the records of steps after
    ``step``, and the records of the last test, because the run writes them again. If a file cannot be
    written, every method raises HybridError with the path of the file.

    Args:
        step: the step after which the run resumes. None for a new run; then ConfigError if ``path`` contains
            a run already, or is a file.
        is_evaluated: False if the evaluation at ``step`` is still due; then its old record is removed.
        unit: the stream's unit in which the run resumes; a record of the unit's end at ``step`` is removed.
        loggers: the loggers of ``config``; None to make them.

    Attributes:
        checkpoint_root: the folder of checkpoints: ``path``, or a folder in a store.
        make_room: called if the disk is full when a record is written; returns whether to try again.
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        step: int | None = None,
        is_evaluated: bool = True,
        unit: str = "",
        loggers: RunLoggers | None = None,
    ) -> None:
        self.path = path
        self.report = path / "report.html"
        self._metrics_path = path / METRICS_FILE
        versions = path / "versions.json"
        with run_write_errors(path):
            if step is None:
                run_access.refuse_existing(path)
                files.remove(versions)  # it would be kept, even if it is a link
            make_folder(path)
            self.checkpoint_root = run_access.checkpoint_root(path)
            for folder in (path, self.checkpoint_root):  # the same, unless the run is in a store
                files.remove(folder / RESULT_FILE)
        if step is not None and self._metrics_path.is_file():
            evaluated = {config.data.selection_split: step if is_evaluated else step - 1}
            # With validation rows, the end of the run has a new test. Step 0 logs the unknown values again.
            last_steps = {TEST: -1, "unknown": step - 1, **evaluated}
            records = read_records(self._metrics_path)
            kept = [record for record in records if record["step"] <= last_steps.get(record["kind"], step)]
            ends_again = {"kind": "unit", "step": step, "unit": unit}.items()
            kept = [record for record in kept if not ends_again <= record.items()]
            with run_write_errors(self._metrics_path):
                write_records(self._metrics_path, kept)
        _write_text(path / CONFIG_FILE, signed_toml(config))
        if not versions.exists():
            _write_text(versions, json_text(_versions()))
        with run_write_errors(self._metrics_path):
            self._metrics = AppendOnlyFile(self._metrics_path, lambda: self.make_room())
        self.make_room: Callable[[], bool] = lambda: False
        self._loggers = loggers or RunLoggers(config, print_line)
        self._loggers.start(self.checkpoint_root.name, path, step or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.close(_STOP_SECONDS if error is None else FAILED_SECONDS)

    def log_progress(self, progress: TrainingProgress) -> None:
        numbers = {
            "loss": progress.loss,
            progress.score_name: progress.score,
            "samples_per_second": progress.samples_per_second,
            **progress.numbers,
        }
        self.log("train", progress.step, numbers, phase_seconds=dict(progress.phase_seconds))
        fractions = progress.phase_fractions.items()
        self._loggers.log(progress.step, {f"time_share/{phase}": value for phase, value in fractions})

    def log(self, kind: str, step: int, numbers: Mapping[str, float], **more: Any) -> None:
        """Append a record of ``step`` to metrics.jsonl, and pass ``numbers`` to the loggers.

        Args:
            kind: "train", "checkpoint", "delta", "unknown" (values), "unit" (of a stream), or a split.
            more: further fields of the record, which the loggers do not get.
        """
        with run_write_errors(self._metrics_path):
            self._metrics.append(kind, step, numbers, **more)
        self._loggers.log(step, {f"{kind}/{name}": value for name, value in numbers.items()})

    def sync(self) -> None:
        """Flush metrics.jsonl to the disk; if the run is in a store, upload its files."""
        with run_write_errors(self._metrics_path):
            self._metrics.sync()
        run_access.upload(self.path)

    def write_profile(self, profile: Profile) -> Path:
        """Write the profile, and return its folder."""
        folder = self.path / "profile"
        with run_write_errors(folder):
            profile.write(folder)
        return folder

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write report.html and result.json, and pass the result to the loggers."""
        self.write_report(result)
        _write_text(self.path / RESULT_FILE, json_text(result))
        self._loggers.finish(replace_non_finite(result))

    def write_report(self, result: Mapping[str, Any]) -> None:
        """Write report.html. For a stopped run, ``result`` has only the placement of tables, as "tables"."""
        _write_text(self.report, report_page([read_run(self.path, result)]))

    def close(self, seconds: float = FAILED_SECONDS) -> None:
        """Close metrics.jsonl, and wait at most ``seconds`` for the loggers."""
        try:
            with run_write_errors(self._metrics_path):
                self._metrics.close()
        finally:
            self._loggers.finish(None, seconds)


def read_run(folder: Path, result: Mapping[str, Any] | None = None) -> ReportedRun:
    """Read the content of a report from the folder of a run.

    Args:
        result: the result to show; None for the content of result.json, which only a finished run has.

    Raises:
        ConfigError, StorageError: the configuration is missing or invalid, or a file cannot be read.
        ValueError: result.json is invalid.
    """
    if result is None:
        path = folder / RESULT_FILE
        result = parse_json(files.read_bytes(path)) if files.is_file(path) else {}
    return ReportedRun(
        run_access.checkpoint_root(folder).name,
        load_config(folder / CONFIG_FILE, is_stored=True),
        read_records(folder / METRICS_FILE),
        run_access.read_restarts(folder),
        result,
    )


def _write_text(path: Path, text: str) -> None:
    with run_write_errors(path):
        files.write_bytes(path, text.encode())


def _versions() -> dict[str, Any]:
    try:
        command = ["git", "rev-parse", "--verify", "HEAD"]
        git = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        commit = git.stdout.strip()
    except (OSError, subprocess.SubprocessError):  # outside a repository, or without git
        commit = None
    return {
        "hybrid": hybrid.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("torch", "numpy")},
        "git_commit": commit,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
