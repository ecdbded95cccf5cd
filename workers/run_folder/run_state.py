"""How far a run has come, as its folder tells. Free of torch, for the launcher."""

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
    """What a run folder holds at a moment.

    Attributes:
        logged_step: how many steps its log knows of.
        checkpoint_step: steps that its newest checkpoint holds; None where there is none.
        log, result: which version of metrics.jsonl and of result.json is there.
    """

    logged_step: int
    checkpoint_step: int | None
    log: _FileVersion
    result: _FileVersion

    @classmethod
    def of(cls, folder: Path) -> RunState:
        """The state of a run folder, which may be empty or missing."""
        log = folder / METRICS_FILE
        return cls(
            _logged_step(log),
            newest_step(checkpoint_root(folder)),
            _version(log),
            _version(folder / RESULT_FILE),
        )

    @property
    def resumed_step(self) -> int:
        """Where the run would go on."""
        return self.checkpoint_step or 0

    def has_stepped_since(self, before: RunState) -> bool:
        """Whether the run has taken a step since the start at which its state was ``before``."""
        return self.log != before.log and self.logged_step > before.resumed_step


def describe_saved_state(folder: Path, command: str) -> str:
    """What a run that was stopped has saved and lost, and how it goes on.

    Args:
        command: that takes ``--resume``: launch, or master.
    """
    state = RunState.of(folder)
    lost = state.logged_step - state.resumed_step
    said = [f"steps {state.resumed_step} to {state.logged_step - 1} are lost"] if lost > 0 else []
    if state.checkpoint_step is None:
        return "; ".join(["nothing is saved", *said])
    again = f"{command_name()} {command} --resume {shlex.quote(str(checkpoint_root(folder)))}"
    return "; ".join([f"step {state.checkpoint_step} is saved", *said, f"to go on: {again}"])


def newest_step(folder: StoragePath) -> int | None:
    """Steps that the newest checkpoint of a run holds, by its name; None where there is none."""
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


def _logged_step(log: Path) -> int:
    records = read_records(log) if log.exists() else []
    return next((record["step"] for record in reversed(records) if record["kind"] == "train"), 0)


def _version(path: Path) -> _FileVersion:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
