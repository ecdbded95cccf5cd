"""The progress of a run, read from its folder. Free of torch, for the launcher."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hybrid.checkpoint import checkpoint_folders
from hybrid.storage.remote_path import StoragePath
from workers.run_folder.remote_run import checkpoint_root
from workers.run_folder.run_paths import METRICS_FILE, RESULT_FILE, command_name

# A line of metrics.jsonl.
Record: TypeAlias = dict[str, Any]
_FileVersion: TypeAlias = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class RunState:
    """The progress of a run at a moment.

    Attributes:
        logged_step: the last step in its log.
        checkpoint_step: the step of its newest checkpoint; None if there is none.
        log, result: the versions of metrics.jsonl and of result.json.
    """

    logged_step: int
    checkpoint_step: int | None
    log: _FileVersion
    result: _FileVersion

    @classmethod
    def of(cls, folder: Path) -> RunState:
        """Return the state of a run folder, which may be empty or missing."""
        log = folder / METRICS_FILE
        records = read_records(log) if log.is_file() else []
        logged = next((each["step"] for each in reversed(records) if each["kind"] == "train"), 0)
        return cls(
            logged, newest_step(checkpoint_root(folder)), _version(log), _version(folder / RESULT_FILE)
        )

    @property
    def resumed_step(self) -> int:
        """The step from which the run would resume."""
        return self.checkpoint_step or 0

    def has_stepped_since(self, before: RunState) -> bool:
        """Return whether the run has taken a step since the start at which its state was ``before``."""
        return self.log != before.log and self.logged_step > before.resumed_step


def describe_saved_state(folder: Path, command: str) -> str:
    """Describe what a stopped run has saved and lost, and how to resume it.

    Args:
        command: the command that takes ``--resume``: launch, or master.
    """
    state = RunState.of(folder)
    lost = state.logged_step - state.resumed_step
    parts = [f"steps {state.resumed_step} to {state.logged_step - 1} are lost"] if lost > 0 else []
    if state.checkpoint_step is None:
        return "; ".join(["nothing is saved", *parts])
    resume = f"{command_name()} {command} --resume {shlex.quote(str(checkpoint_root(folder)))}"
    return "; ".join([f"step {state.checkpoint_step} is saved", *parts, f"to resume: {resume}"])


def newest_step(folder: StoragePath) -> int | None:
    """Return the step of a run's newest checkpoint, from its name; None if there is none."""
    return next(map(checkpoint_folders.parse_step, checkpoint_folders.list_checkpoints(folder)), None)


def read_records(path: Path) -> list[Record]:
    """Return the records of metrics.jsonl, without lines that a kill or a power cut has damaged."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record:
                records.append(record)
    return records


def _version(path: Path) -> _FileVersion:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
