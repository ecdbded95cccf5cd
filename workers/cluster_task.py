"""The task of a cluster's master. Free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class TrainTask:
    """Train and evaluate a model, and leave a run folder.

    Attributes:
        folder: of the run.
        resume: whether to continue from its newest checkpoint, or from the start if it has none.
        started_at: ``time.time()`` of the user's command.
    """

    command: ClassVar = "launch"
    folder: Path
    resume: bool
    started_at: float


@dataclass(frozen=True, slots=True)
class CompareTask:
    """Train some steps on the cluster and in one process, and print the differences."""

    command: ClassVar = "compare"
    steps: int


@dataclass(frozen=True, slots=True)
class FunctionTask:
    """Call a function of the user on the master.

    Attributes:
        function: "module:function".
    """

    command: ClassVar = "run"
    function: str


@dataclass(frozen=True, slots=True)
class ScriptTask:
    """Run a script of the user on every trainer.

    Attributes:
        path: of the script.
        arguments: of the script.
        snapshot: where to save the state after ``train.max_steps``, or None.
    """

    command: ClassVar = "run"
    path: str
    arguments: tuple[str, ...]
    snapshot: Path | None = None


Task: TypeAlias = TrainTask | CompareTask | FunctionTask | ScriptTask
