"""Writing and reading of a checkpoint, of which every role holds a part."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hybrid import transport
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_manifest import (
    PROGRESS_FILE,
    Files,
    Manifest,
    dense_file,
    write_copy,
    write_text,
)
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import DenseSection
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.data.encode.vocabulary import VOCABULARIES_FILE
from hybrid.errors import CheckpointError
from hybrid.server.hosted_module import Hosted
from hybrid.storage.remote_path import StoragePath
from workers.controller.deployment import BULK_TIMEOUT_SECONDS, Called, Deployment
from workers.controller.remote_trainer import Trainer

_POLL_SECONDS = 0.02


class Counted(NamedTuple):
    """The counts of a run, as a checkpoint stores them.

    Attributes:
        values: in the manifest.
        reports: in a separate file, if there are any.
    """

    values: Mapping[str, Any]
    reports: Mapping[str, Tensor]


NOTHING_COUNTED = Counted({}, {})


@dataclasses.dataclass(frozen=True)
class Saving:
    """A checkpoint whose parts the roles hold in memory until it is written.

    Attributes:
        folder: of the checkpoint.
        manifest: without the list of files.
        texts: text files, by name.
        reports: see :class:`Counted`.
        start: starts the calls that make roles write their parts into a folder and release them.
        is_copied: whether roles hold copies, so that training can continue.
        shared: vocabularies by name. The checkpoints of a run share them; other checkpoints have a copy.
    """

    folder: StoragePath
    manifest: Manifest
    texts: Mapping[str, str]
    reports: Mapping[str, Tensor]
    start: Callable[[StoragePath], Sequence[transport.Pending[Files]]]
    is_copied: bool
    shared: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    def write(self) -> Manifest:
        """Write all files, complete the checkpoint, and return its manifest; in any thread.

        Raises:
            CheckpointError: a file cannot be written; the unfinished checkpoint is removed.
            RemoteError, LostError: as :meth:`hybrid.transport.Pending.wait`.
        """
        partial = checkpoint_folders.begin(self.folder)
        try:
            manifest = dataclasses.replace(self.manifest, files=self._write_files(partial))
            checkpoint_folders.commit(partial, manifest)
        except BaseException:
            checkpoint_folders.discard(partial)
            raise
        return manifest

    def _write_files(self, partial: StoragePath) -> Files:
        """Write all files; wait for every role, also after an error."""
        writers = self.start(partial.absolute())  # other roles have other working directories
        try:
            files: Files = {}
            for name, text in self.texts.items():
                files |= write_text(partial, name, text)
            for name, source in self.shared.items():
                if checkpoint_folders.belongs_to_run(self.folder):
                    checkpoint_folders.save_vocabulary(source, self.folder, name)
                else:
                    files |= write_copy(partial, VOCABULARIES_FILE, source)
            if self.reports:
                files |= write_tensors(partial, PROGRESS_FILE, self.reports)
        finally:
            for writer in writers:  # they write until they are done
                while not writer.done(_POLL_SECONDS):
                    pass
        try:
            for writer in writers:
                files |= writer.wait()
        except transport.RemoteError as error:
            if error.failure.is_users:
                raise CheckpointError(str(error)) from error
            raise
        return files


def hold(
    deployed: Deployment, dense: DenseSection, is_copied: bool, meanwhile: Callable[[], object]
) -> list[transport.Remote[Called]]:
    """Let every role hold its part of a checkpoint, as of the steps taken; return the roles with a part.

    Args:
        is_copied: whether workers hold copies.
        meanwhile: called repeatedly during the wait.
    """
    deployed.settle(meanwhile)
    bulk = BULK_TIMEOUT_SECONDS
    files = _dense_files(dense, len(deployed.trainers))
    calls = [each.call(Hosted.begin_save, is_copied, timeout_seconds=bulk) for each in deployed.hosted]
    for trainer, name in zip(deployed.trainers, files, strict=True):
        calls.append(trainer.call(Trainer.begin_save, name, timeout_seconds=bulk))
    transport.gather(calls, meanwhile)
    return [*deployed.hosted, *(t for t, name in zip(deployed.trainers, files, strict=True) if name)]


def load(deployed: Deployment, dense: DenseSection, stored: Checkpoint) -> None:
    """Make every role load its part of a checkpoint; CheckpointError if it is of another model."""
    bulk, folder = BULK_TIMEOUT_SECONDS, stored.folder
    there = folder.absolute()
    calls = [
        each.call(Hosted.load, there, stored.manifest.step, timeout_seconds=bulk) for each in deployed.hosted
    ]
    is_same_mode = load_config(stored.parts / CONFIG_FILE, is_stored=True).dense.ddp == dense.ddp
    for index, trainer in enumerate(deployed.trainers):
        own = dense_file(index - index % dense.trainers_per_net)
        name = own if is_same_mode and own in stored.manifest.files else dense_file(0)
        calls.append(trainer.call(Trainer.load, there, name, timeout_seconds=bulk))
    transport.gather(calls)


def _dense_files(dense: DenseSection, num_trainers: int) -> list[str | None]:
    """Return the file for the net of each trainer; None if another trainer saves the same net."""
    saving = range(0, 1 if dense.ddp == "outside" else num_trainers, dense.trainers_per_net)
    return [dense_file(index) if index in saving else None for index in range(num_trainers)]
