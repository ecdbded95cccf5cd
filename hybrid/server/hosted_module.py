"""The base of what a worker hosts: timings, checkpoints and an update barrier."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hybrid.checkpoint.checkpoint_manifest import Files
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.primitives.step_timings import Span, StepClock
from hybrid.server.barrier import UpdateBarrier
from hybrid.storage.remote_path import StoragePath


class Hosted(nn.Module):
    """Base of the modules that the master creates on a worker as a ``RemoteModule``.

    Attributes:
        barrier: update barrier between the steps of all trainers.
        clock: records timings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.barrier: UpdateBarrier[Any]
        self.clock = StepClock()
        self._held: Mapping[str, Mapping[str, Tensor]] = {}

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self.barrier.version

    def record(self, steps: range) -> None:
        """See :meth:`StepClock.record`."""
        self.clock.record(steps)

    def take_spans(self) -> list[Span]:
        """See :meth:`StepClock.take_spans`; waits for running updates first."""
        self.barrier.drain()
        return self.clock.take_spans()

    def begin_save(self, is_copied: bool) -> None:
        """Take the tensors of a checkpoint, after all running updates, for :meth:`write`.

        Args:
            is_copied: whether to copy them, so that training can continue; else it must wait for the write.
        """
        self.barrier.drain()
        self._held = {}  # free those of a checkpoint that was not written
        self._held = self._files(is_copied)

    def write(self, folder: StoragePath) -> Files:
        """Write the taken tensors into a checkpoint folder, and free them."""
        held, self._held = self._held, {}
        files: Files = {}
        for name, tensors in held.items():
            files |= write_tensors(folder, name, tensors)
        return files

    def load(self, folder: StoragePath, step: int) -> None:
        """Load the tensors of a checkpoint, and continue after ``step`` steps."""
        raise NotImplementedError

    def _files(self, is_copied: bool) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the tensors of each file of a checkpoint."""
        raise NotImplementedError

    def close(self) -> None:
        """End the background thread."""
        self.barrier.close()
