"""The task of a cluster's master. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class TrainTask:
    """Train and evaluate a model, and leave a run folder."""

    command: ClassVar = "launch"
    folder: Path
    resume: bool  # whether to continue from the newest checkpoint, or from step 0 if there is none
    started_at: float  # ``time.time()`` when the user's command started


@dataclass(frozen=True, slots=True)
class CompareTask:
    """Train some steps on the cluster and in one process, and print the differences."""

    command: ClassVar = "compare"
    steps: int
    result: Path  # file to write: the differences as JSON


@dataclass(frozen=True, slots=True)
class ScriptTask:
    """Run a script of the user on every trainer."""

    command: ClassVar = "run"
    path: str
    arguments: tuple[str, ...]
    snapshot: Path | None = None  # folder for the state after ``train.max_steps`` steps; None to save none
    # A folder in which the master records the state for a restart; None if no launcher restarts the script.
    scratch: Path | None = None


Task: TypeAlias = TrainTask | CompareTask | ScriptTask
