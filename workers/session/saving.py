"""A checkpoint that every role holds its part of, on its way to the disk and back."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hybrid import wire
from hybrid.checkpoint import folders
from hybrid.checkpoint.files import PROGRESS_FILE, Files, dense_file, write_text
from hybrid.checkpoint.manifest import Manifest
from hybrid.checkpoint.reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import DenseSection
from hybrid.config.file import CONFIG_FILE, load_config
from hybrid.errors import CheckpointError
from hybrid.hosting.hosted import Hosted
from workers.session.deployment import BULK_TIMEOUT_SECONDS, Called, Deployment
from workers.session.trainer import Trainer

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
    start: Callable[[Path], Sequence[wire.Pending[Files]]]
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


def hold(deployed: Deployment, dense: DenseSection, is_copied: bool) -> list[wire.Remote[Called]]:
    """Let every role hold what it is to write, as of the steps taken; those that then have something.

    Args:
        is_copied: whether workers hold copies.
    """
    deployed.settle()
    bulk = BULK_TIMEOUT_SECONDS
    files = _dense_files(dense, len(deployed.trainers))
    calls = [each.call(Hosted.begin_save, is_copied, timeout_seconds=bulk) for each in deployed.hosted]
    for trainer, name in zip(deployed.trainers, files, strict=True):
        calls.append(trainer.call(Trainer.begin_save, name, timeout_seconds=bulk))
    wire.gather(calls)
    return [*deployed.hosted, *(t for t, name in zip(deployed.trainers, files, strict=True) if name)]


def load(deployed: Deployment, dense: DenseSection, stored: Checkpoint) -> None:
    """Have every role take its part of a checkpoint; CheckpointError where it is of another model."""
    bulk, folder = BULK_TIMEOUT_SECONDS, stored.folder
    calls = [
        each.call(Hosted.load, folder, stored.manifest.step, timeout_seconds=bulk) for each in deployed.hosted
    ]
    is_same_mode = load_config(folder / CONFIG_FILE).dense.ddp == dense.ddp
    for index, trainer in enumerate(deployed.trainers):
        own = dense_file(index - index % dense.trainers_per_net)
        name = own if is_same_mode and own in stored.manifest.files else dense_file(0)
        calls.append(trainer.call(Trainer.load, folder, name, timeout_seconds=bulk))
    wire.gather(calls)


def _dense_files(dense: DenseSection, num_trainers: int) -> list[str | None]:
    """The file in which each trainer saves its net; None where another one saves the same net."""
    saving = range(0, 1 if dense.ddp == "outside" else num_trainers, dense.trainers_per_net)
    return [dense_file(index) if index in saving else None for index in range(num_trainers)]
