"""A checkpoint that every role holds its part of, on its way to the disk and back."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hybrid import transport
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_files import PROGRESS_FILE, Files, dense_file, write_copy, write_text
from hybrid.checkpoint.checkpoint_manifest import Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import DenseSection
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.data.encode.vocabulary_file import VOCABULARIES_FILE
from hybrid.errors import CheckpointError
from hybrid.server.hosted_module import Hosted
from hybrid.storage.remote_path import StoragePath
from workers.controller.deployment import BULK_TIMEOUT_SECONDS, Called, Deployment
from workers.controller.remote_trainer import Trainer

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
        shared: the vocabularies, which the checkpoints of a run share, by the name that it keeps them under;
            one that is not a run's has them itself.
    """

    folder: StoragePath
    manifest: Manifest
    texts: Mapping[str, str]
    reports: Mapping[str, Tensor]
    start: Callable[[StoragePath], Sequence[transport.Pending[Files]]]
    is_copied: bool
    shared: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    def write(self) -> Manifest:
        """Write everything, and make it a checkpoint, in any thread; its manifest.

        Raises:
            CheckpointError: a file cannot be written. Nothing is left of it.
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
        """Write all files, and return once every role has written its own or failed to."""
        writers = self.start(partial.absolute())  # other roles may run in other folders
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
            for writer in writers:  # until it is done, it still writes
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
    """Let every role hold what it is to write, as of the steps taken; those that then have something.

    Args:
        is_copied: whether workers hold copies.
        meanwhile: called every now and then.
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
    """Have every role take its part of a checkpoint; CheckpointError where it is of another model."""
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
    """The file in which each trainer saves its net; None where another one saves the same net."""
    saving = range(0, 1 if dense.ddp == "outside" else num_trainers, dense.trainers_per_net)
    return [dense_file(index) if index in saving else None for index in range(num_trainers)]
