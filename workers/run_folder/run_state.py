"""The progress of a run, and whether it can be resumed. Free of torch, for the launcher."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hybrid.checkpoint import checkpoint_folders
from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE, fixed_values, load_config
from hybrid.config.sections import NAMED_KEYS
from hybrid.errors import ConfigError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.user_code.run_signature import load_run_config
from workers.run_folder.run_access import checkpoint_root
from workers.run_folder.run_paths import METRICS_FILE, RESULT_FILE, RUNS, command_name

# A line of metrics.jsonl.
Record: TypeAlias = dict[str, Any]
_FileVersion: TypeAlias = tuple[int, int, int] | None
_LIMITS = ("epochs", "max_steps", "patience")  # keys of [train] that end a run


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


def load_resumed_config(run: StoragePath, overrides: Sequence[str], trust_code: bool = False) -> RunConfig:
    """Return the configuration of a run to resume, with overrides.

    Args:
        trust_code: whether the user trusts the run, whoever has written it.

    Raises:
        ConfigError: there is no run, the run names code or paths that the user has not signed, or an override
            changes the model or the data.
    """
    if not files.is_file(run / CONFIG_FILE):
        raise ConfigError("--resume", "contains no run", str(run))
    config = load_run_config(run / CONFIG_FILE, overrides, trust_code, uses_paths=True)
    check_same_model(run, config)
    return config


def check_same_model(run: StoragePath, config: RunConfig) -> None:
    """Raise ConfigError if ``config`` has another model or other data than ``run``."""
    before, now = fixed_values(load_config(run / CONFIG_FILE, is_stored=True)), fixed_values(config)
    for dotted in before | now:
        # A key of [tables.NAME] or [columns.NAME] without such a section has its default.
        kind, _, rest = dotted.partition(".")
        key = NAMED_KEYS.get(kind, {}).get(rest.rpartition(".")[2])
        default = None if key is None else key.default
        default = list(default) if isinstance(default, tuple) else default
        old, new = before.get(dotted, default), now.get(dotted, default)
        if old != new:
            raise ConfigError(dotted, f"the run to resume has {old!r}; keep that, or start a new run", new)


def newest_run(config: RunConfig) -> StoragePath | None:
    """Return run.folder, or the newest run of this name; None if there is no run."""
    folder = config.run.folder
    if folder:
        return parse_path(folder) if files.is_file(parse_path(folder) / CONFIG_FILE) else None
    # As run_path names them.
    pattern = re.compile(rf"{re.escape(config.run.name)}-(\d{{8}}-\d{{6}})(?:\.(\d+))?")
    runs = [
        (match[1], int(match[2] or 1), path)
        for path in RUNS.glob("*")
        if (match := pattern.fullmatch(path.name)) and files.is_file(path / CONFIG_FILE)
    ]
    return max(runs)[2] if runs else None


def is_finished(run: StoragePath, config: RunConfig) -> bool:
    """Return whether a run has finished, and ``config`` does not prolong it."""
    if not files.exists(run / RESULT_FILE):
        return False
    before, now = load_config(run / CONFIG_FILE, is_stored=True).train, config.train
    return all(getattr(before, key) == getattr(now, key) for key in _LIMITS)
