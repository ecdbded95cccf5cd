"""The tasks that a command gives to the master of a cluster. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class TrainTask:
    """A training run, with evaluations, checkpoints and a run folder."""

    command: ClassVar = "launch"
    folder: Path
    resume: bool  # whether to continue from the newest checkpoint, or from step 0 if there is none
    started_at: float  # ``time.time()`` when the user's command started


@dataclass(frozen=True, slots=True)
class CompareTask:
    """A comparison of the same training steps on the cluster and in one process."""

    command: ClassVar = "compare"
    steps: int
    result: Path  # file to write: the differences as JSON


@dataclass(frozen=True, slots=True)
class ScriptTask:
    """A user script, run by every trainer. ``snapshot`` is for comparisons, ``scratch`` for restarts."""

    command: ClassVar = "run"
    path: str
    arguments: tuple[str, ...]
    snapshot: Path | None = None  # folder for the state after ``train.max_steps`` steps; None to save none
    # A folder in which the master records the script's checkpoint folder, for restarts; None without them.
    scratch: Path | None = None


Task: TypeAlias = TrainTask | CompareTask | ScriptTask
