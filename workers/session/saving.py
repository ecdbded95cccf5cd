"""A checkpoint that every role holds its part of, on its way to the disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hybrid import wire
from hybrid.checkpoint import folders
from hybrid.checkpoint.files import PROGRESS_FILE, Files, write_text
from hybrid.checkpoint.manifest import Manifest
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.errors import CheckpointError

_POLL_SECONDS = 0.02


class Counted(NamedTuple):
    """What a run has counted so far, as a checkpoint holds it.

    Attributes:
        values: in its manifest.
        reports: in a file of their own, if there are any.
    """

    values: Mapping[str, Any]
    reports: Mapping[str, Tensor]


NOTHING_COUNTED = Counted({}, {})


class Writing(Protocol):
    """A role's call that writes its files, and answers with them: a :class:`hybrid.wire.Pending`."""

    def done(self, wait_seconds: float = 0.0) -> bool: ...

    def wait(self) -> Files: ...


@dataclasses.dataclass(frozen=True)
class Saving:
    """What every role holds of one moment of a run, and how it becomes a checkpoint.

    Attributes:
        folder: of the checkpoint.
        manifest: without the files.
        texts: text files, by name.
        reports: see :class:`Counted`.
        start: starts the calls by which roles write into a folder what they hold, and let go of it.
        is_copied: whether they hold copies, so that training may go on meanwhile.
    """

    folder: Path
    manifest: Manifest
    texts: Mapping[str, str]
    reports: Mapping[str, Tensor]
    start: Callable[[Path], Sequence[Writing]]
    is_copied: bool

    def write(self) -> Manifest:
        """Write everything, and make it a checkpoint, in any thread; its manifest.

        Raises:
            CheckpointError: a file cannot be written. Nothing is left of it.
            RemoteError, LostError: as :meth:`hybrid.wire.Pending.wait`.
        """
        partial = folders.begin(self.folder)
        try:
            manifest = dataclasses.replace(self.manifest, files=self._write_files(partial))
            folders.commit(partial, manifest)
        except BaseException:
            folders.discard(partial)
            raise
        return manifest

    def _write_files(self, partial: Path) -> Files:
        """Write all files, and return once every role has written its own or failed to."""
        writers = self.start(partial)
        try:
            files: Files = {}
            for name, text in self.texts.items():
                files |= write_text(partial, name, text)
            if self.reports:
                files |= write_tensors(partial, PROGRESS_FILE, self.reports)
        finally:
            for writer in writers:  # until it is done, it still writes
                while not writer.done(_POLL_SECONDS):
                    pass
        try:
            for writer in writers:
                files |= writer.wait()
        except wire.RemoteError as error:
            if error.failure.is_users:
                raise CheckpointError(str(error)) from error
            raise
        return files
