"""What a worker hosts, tables or a dense net: recorded, saved and loaded as one; updated at its barrier."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hybrid.checkpoint.checkpoint_files import Files
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.primitives.step_timings import Span, StepClock
from hybrid.server.barrier import UpdateBarrier
from hybrid.storage.remote_path import StoragePath


class Hosted(nn.Module):
    """Base of what the master creates on a worker as a ``RemoteModule``.

    Attributes:
        barrier: between the steps of all trainers.
        clock: records what happens here, where it is told to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.barrier: UpdateBarrier[Any]
        self.clock = StepClock()
        self._held: Mapping[str, Mapping[str, Tensor]] = {}

    @property
    def version(self) -> int:
        """How many updates it has seen."""
        return self.barrier.version

    def record(self, steps: range) -> None:
        """See :meth:`StepClock.record`."""
        self.clock.record(steps)

    def take_spans(self) -> list[Span]:
        """See :meth:`StepClock.take_spans`; with those of updates that are under way."""
        self.barrier.drain()
        return self.clock.take_spans()

    def begin_save(self, is_copied: bool) -> None:
        """Hold what a checkpoint is to have of it, with all updates that are under way, for :meth:`write`.

        Args:
            is_copied: hold a copy, so that training may go on at once; else it must wait.
        """
        self.barrier.drain()
        self._held = {}  # what is left of one that nobody has written
        self._held = self._files(is_copied)

    def write(self, folder: StoragePath) -> Files:
        """Write what it holds into a checkpoint folder, and let go of it."""
        held, self._held = self._held, {}
        files: Files = {}
        for name, tensors in held.items():
            files |= write_tensors(folder, name, tensors)
        return files

    def load(self, folder: StoragePath, step: int) -> None:
        """Take from a checkpoint what it holds, and go on as after ``step`` steps."""
        raise NotImplementedError

    def _files(self, is_copied: bool) -> Mapping[str, Mapping[str, Tensor]]:
        """What is written into which file of a checkpoint."""
        raise NotImplementedError

    def close(self) -> None:
        """End the background thread."""
        self.barrier.close()
