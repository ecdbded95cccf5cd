"""Writing the files of a run folder."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import hybrid
from hybrid.config import RunConfig
from hybrid.config.data_sections import TEST
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.metrics import Metrics
from hybrid.storage import files
from hybrid.storage.file_formats import parse_json
from hybrid.storage.private_files import make_folder, open_file
from hybrid.user_code.run_signature import signed_toml
from workers.console.messages import finite, json_text
from workers.console.terminal import TrainingProgress
from workers.run_folder import run_access
from workers.run_folder.run_access import METRICS_FILE, RESULT_FILE, run_write_errors
from workers.run_folder.run_report import ReportedRun, report_page
from workers.run_folder.step_profile import Profile


class RunFolder:
    """The files of one run; call ``create`` or ``reopen``, then ``close``, or use it in a ``with`` block.

    Every method raises HybridError with the path of the file if a file cannot be written.

    Attributes:
        checkpoint_root: the folder of checkpoints: ``path``, or a folder in a store.
        make_room: called if the disk is full when a record is written; returns whether to try again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = path / "report.html"
        self.checkpoint_root = run_access.checkpoint_root(path)
        self._metrics_path = path / METRICS_FILE
        with run_write_errors(self._metrics_path):
            self._metrics = AppendOnlyFile(self._metrics_path, lambda: self.make_room())
        self._events = _EventFile(path, lambda: self.make_room())
        self.make_room: Callable[[], bool] = lambda: False

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """Make the folder of a new run; ConfigError if ``path`` contains a run already."""
        run_access.refuse_existing(path)
        with run_write_errors(path):
            make_folder(path)
        _write_text(path / CONFIG_FILE, signed_toml(config))
        _write_text(path / "versions.json", json_text(_versions()))
        return cls(path)

    @classmethod
    def reopen(
        cls, path: Path, config: RunConfig, step: int, is_evaluated: bool = True, unit: str = ""
    ) -> RunFolder:
        """Open the folder of a run that resumes after ``step``; later records are dropped.

        The folder may be empty, if the run was killed early.

        Args:
            is_evaluated: whether the evaluation after ``step``, if one is due, was done.
            unit: the unit of a stream that is read again from ``step`` on, to its end.
        """
        with run_write_errors(path):
            make_folder(path)
            for folder in (path, run_access.checkpoint_root(path)):  # the same, unless the run is in a store
                files.remove(folder / RESULT_FILE)
        if (path / METRICS_FILE).is_file():
            evaluated = {config.data.selection_split: step if is_evaluated else step - 1}
            # With validation rows, the end of the run has a new test. Step 0 logs the unknown values again.
            last_steps = {TEST: -1, "unknown": step - 1, **evaluated}
            records = run_access.read_records(path / METRICS_FILE)
            kept = [record for record in records if record["step"] <= last_steps.get(record["kind"], step)]
            ends_again = {"kind": "unit", "step": step, "unit": unit}.items()
            kept = [record for record in kept if not ends_again <= record.items()]
            _write_text(path / METRICS_FILE, "".join(f"{json.dumps(record)}\n" for record in kept))
        _write_text(path / CONFIG_FILE, signed_toml(config))
        if not (path / "versions.json").exists():
            _write_text(path / "versions.json", json_text(_versions()))
        opened = cls(path)
        opened._events.restart(step + 1)
        return opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_progress(self, progress: TrainingProgress) -> None:
        numbers = {
            "loss": progress.loss,
            progress.score_name: progress.score,
            "samples_per_second": progress.samples_per_second,
            **progress.numbers,
        }
        self._append("train", progress.step, numbers, phase_seconds=dict(progress.phase_seconds))
        self._events.write(progress.step, {f"train/{name}": value for name, value in numbers.items()})
        fractions = progress.phase_fractions.items()
        self._events.write(progress.step, {f"time_share/{phase}": value for phase, value in fractions})

    def log_evaluation(self, split: str, step: int, metrics: Metrics) -> None:
        """Append the metrics of the rows of a split after ``step``."""
        numbers = dict(metrics)
        self._append(split, step, numbers)
        self._events.write(step, {f"{split}/{name}": value for name, value in numbers.items()})

    def log_unit(self, step: int, name: str, metrics: Metrics) -> None:
        """Append the progressive metrics of a unit of a stream, which ended at ``step``."""
        self._append("unit", step, dict(metrics), unit=name)
        self._events.write(step, {f"unit/{name}": value for name, value in metrics.items()})

    def log_checkpoint(
        self, kind: str, step: int, seconds_stopped: float, seconds_writing: float, num_bytes: int
    ) -> None:
        """Append the checkpoint, or the delta, of ``step``.

        Args:
            kind: "checkpoint" or "delta".
            seconds_stopped: how long training was paused for it.
            seconds_writing: how long writing took.
        """
        numbers = {"seconds_stopped": seconds_stopped, "seconds_writing": seconds_writing, "bytes": num_bytes}
        self._append(kind, step, numbers)

    def sync(self) -> None:
        """Flush the log to the disk; upload the files of a run in a store."""
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
        """Write the report and the result."""
        self.write_report(result)
        _write_text(self.path / RESULT_FILE, json_text(result))

    def write_report(self, result: Mapping[str, Any]) -> None:
        """Write the page of the run; ``result`` of a stopped run has its tables only."""
        _write_text(self.report, report_page([read_run(self.path, result)]))

    def close(self) -> None:
        try:
            with run_write_errors(self._metrics_path):
                self._metrics.close()
        finally:
            self._events.close()

    def _append(self, kind: str, step: int, numbers: Mapping[str, float], **more: Any) -> None:
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **numbers, **more}
        with run_write_errors(self._metrics_path):
            self._metrics.write(f"{json.dumps(finite(record), allow_nan=False)}\n".encode())


def read_run(folder: Path, result: Mapping[str, Any] | None = None) -> ReportedRun:
    """Read what a report shows of a run.

    Args:
        result: None for that of result.json, if the run has finished.

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
        run_access.read_records(folder / METRICS_FILE),
        run_access.read_restarts(folder),
        result,
    )


class _EventFile:
    """A TensorBoard event file, written synchronously.

    SummaryWriter is not used: its thread prints a stack and loses records if the disk is full.
    """

    def __init__(self, folder: Path, make_room: Callable[[], bool]) -> None:
        # Imported here: the imports take 0.1 s.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._session_log, self._summary = Event, SessionLog, Summary
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with run_write_errors(self._path):
            self._file = AppendOnlyFile(self._path, make_room)
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append scalars, without those that are not finite."""
        value = self._summary.Value
        values = [value(tag=tag, simple_value=x) for tag, x in numbers.items() if math.isfinite(x)]
        self._add(step=step, summary=self._summary(value=values))

    def restart(self, step: int) -> None:
        """Make TensorBoard ignore the records of earlier files from ``step`` on."""
        self._add(step=step, session_log=self._session_log(status=self._session_log.START))

    def close(self) -> None:
        with run_write_errors(self._path):
            self._file.close()

    def _add(self, **fields: Any) -> None:
        with run_write_errors(self._path):
            self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class AppendOnlyFile:
    """A file to which records are appended; created if it is missing.

    Args:
        make_room: called if the disk is full; returns whether to try again.

    Raises:
        HybridError: the path is a symbolic link.
        OSError: the file cannot be opened. Methods raise it if a system call fails.
    """

    def __init__(self, path: Path, make_room: Callable[[], bool]) -> None:
        self._make_room = make_room
        self._descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def write(self, record: bytes) -> None:
        """Append a record; if that fails, the file is unchanged."""
        try:
            self._write(record)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room():
                raise
            self._write(record)

    def _write(self, record: bytes) -> None:
        end = os.fstat(self._descriptor).st_size
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):  # a file that cannot be truncated stays as it is
                os.ftruncate(self._descriptor, end)
            raise

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


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
