"""What the master of a cluster is there for. Free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class TrainTask:
    """Train, evaluate, and leave a run folder.

    Attributes:
        folder: of the run.
        resume: whether to go on in it: from its newest checkpoint, or from the start where it has none.
        started_at: ``time.time()`` of the user's command.
    """

    command: ClassVar = "launch"
    folder: Path
    resume: bool
    started_at: float


@dataclass(frozen=True, slots=True)
class CompareTask:
    """Train some steps on the cluster and in one process, and print what differs."""

    command: ClassVar = "compare"
    steps: int


@dataclass(frozen=True, slots=True)
class OwnTask:
    """Call a function of the user's own.

    Attributes:
        function: "module:function".
    """

    command: ClassVar = "run"
    function: str


@dataclass(frozen=True, slots=True)
class ScriptTask:
    """Run a script of the user's own on every trainer.

    Attributes:
        path: of the file.
        arguments: that it is started with.
        snapshot: where to save what there is after ``train.max_steps``, or None.
    """

    command: ClassVar = "run"
    path: str
    arguments: tuple[str, ...]
    snapshot: Path | None = None


Task: TypeAlias = TrainTask | CompareTask | OwnTask | ScriptTask
