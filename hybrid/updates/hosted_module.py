"""The base class of the modules on a worker: tables, and dense nets that trainers use by RPC."""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

from torch import Tensor, nn
from torch.futures import Future

from hybrid.checkpoint.checkpoint_folders import Files
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.primitives.step_timings import Span, StepClock
from hybrid.storage.remote_path import StoragePath
from hybrid.updates.barrier import UpdateBarrier

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class HostedModule(nn.Module):
    """Base of the modules that the master creates on a worker as a ``RemoteModule``."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier: UpdateBarrier[Any]
        self.clock = StepClock()
        self._checkpoint_tensors: Mapping[str, Callable[[], Mapping[str, Tensor]]] = {}

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> Future[Result]:
        """Call a method of the update barrier with ``args``; return a completed future of the result."""
        response: Future[Result] = Future()
        response.set_result(method(self.barrier, *args))
        return response

    def squared_norm(self, step: int) -> Future[float]:
        return self.barrier.squared_norm(step)

    def record(self, steps: range) -> None:
        self.clock.record(steps)

    def take_spans(self) -> list[Span]:
        """Wait for running updates, then return the timed events that ended since the last call."""
        self.barrier.drain()
        return self.clock.take_spans()

    def begin_save(self, is_copied: bool, is_delta: bool = False) -> None:
        """Wait for running updates, and keep the tensors of a checkpoint for :meth:`write`.

        Args:
            is_copied: whether to copy the tensors, so that training can continue before they are written.
            is_delta: whether to keep a delta instead: copies of changed rows, or of the parameters of a net.
        """
        self.barrier.drain()
        self._checkpoint_tensors = {}  # free the tensors of a checkpoint that was not written
        self._checkpoint_tensors = self._files(is_copied, is_delta)

    def write(self, folder: StoragePath) -> Files:
        """Write and free the tensors of :meth:`begin_save`; return the files. CheckpointError on failure."""
        tensors_of_file = dict(self._checkpoint_tensors)
        self._checkpoint_tensors = {}
        files: Files = {}
        while tensors_of_file:
            name, tensors = tensors_of_file.popitem()
            files |= write_tensors(folder, name, tensors())
            del tensors
        with suppress(AttributeError):  # the C library is not glibc
            # Each thread that has written a checkpoint would keep the free memory of its copies.
            ctypes.CDLL(None).malloc_trim(0)
        return files

    def load(self, folder: StoragePath, step: int) -> None:
        """Load the tensors of a checkpoint, and continue after ``step`` steps."""
        raise NotImplementedError

    def _files(self, is_copied: bool, is_delta: bool) -> Mapping[str, Callable[[], Mapping[str, Tensor]]]:
        """Return, by file name, a function that returns the tensors of a file of a checkpoint or delta."""
        raise NotImplementedError

    def close(self) -> None:
        self.barrier.close()
