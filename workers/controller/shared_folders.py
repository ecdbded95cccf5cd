"""Checks, before the first step, that roles on other hosts see the folders that they share with the master.

::

    master                                      role on another host
    ──────                                      ────────────────────
    prepared data: the manifest               ► reads that manifest
    run folder: a file of random bytes,       ► reads it; a role that will write
      removed afterwards                          there writes and removes a file

Nothing is checked if all roles see the files of the master's host.
"""

import os
import secrets
import socket
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hybrid import transport
from hybrid.checkpoint.checkpoint_folders import write_errors
from hybrid.data.dataset.dataset_manifest import FILE_NAME
from hybrid.errors import CheckpointError, DataError, StorageError
from hybrid.primitives.available_memory import boot_id
from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath, StoragePath
from hybrid.topology import Role, RoleKind

_DATA_KEY = "data.cache_folder"
_PREFIX = ".seen-by-all-"
_TOKEN_BYTES = 16
_SECONDS = 60.0  # a network file system may be slow


def filesystem_id() -> str:
    """Return an id of the boot and the mount namespace; processes with the same id see the same files."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/mnt')}"


def check_folder(key: str, file: StoragePath, content: bytes, writes: bool, master: str) -> None:
    """Check, on a role, that ``file`` has the ``content`` that it has on the master's host.

    Args:
        key: the configuration key of the folder, for errors.
        writes: whether the role must also be able to write into the folder.
        master: the name of the master's host, for errors.

    Raises:
        DataError, CheckpointError: the file is missing or different, or the folder cannot be written.
        StorageError: a request to a store fails.
    """
    host = socket.gethostname()
    kind = DataError if key == _DATA_KEY else CheckpointError
    rule = f"is a different folder than on the master's host {master} ({{}})"
    message = f"{file.parent} on host {host} {rule}; {key} must be storage that all hosts share"
    try:
        found = files.read_bytes(file)
        if writes:
            probe = file.parent / f"{file.name}-{secrets.token_hex(_TOKEN_BYTES)}"
            files.write_bytes(probe, b"")
            files.remove(probe)
    except StorageError as error:  # its message has the remedy
        raise type(error)(f"host {host}: {error}") from error
    except OSError as error:
        raise kind(message.format(error.strerror)) from error
    if found != content:
        raise kind(message.format("it holds other files"))


@dataclass(frozen=True, slots=True)
class SharedFolders:
    """Checks of the folders that all roles share."""

    remote_roles: Sequence[Role]  # roles on other hosts, or with other mounts, than the master
    saving_trainers: Container[int]  # the trainers that write into checkpoints

    def check_data(self, folder: StoragePath) -> None:
        """Check that all trainers see the prepared data, unless in a store; RemoteError if one does not."""
        trainers = [role for role in self.remote_roles if role.kind is RoleKind.TRAINER]
        if trainers and not isinstance(folder, RemotePath):
            manifest = folder.absolute() / FILE_NAME
            _check(_DATA_KEY, manifest, files.read_bytes(manifest), dict.fromkeys(trainers, False))

    def check_run(self, run: StoragePath) -> None:
        """Check that all roles see the run folder, and that workers and ``saving_trainers`` can write there.

        RemoteError if a role fails the check; CheckpointError or StorageError if the master cannot write.
        """
        if not self.remote_roles:
            return
        content = secrets.token_hex(_TOKEN_BYTES)
        file = run.absolute() / f"{_PREFIX}{content}"
        saving = self.saving_trainers
        writes = {role: role.kind is RoleKind.WORKER or role.index in saving for role in self.remote_roles}
        with write_errors(file):
            files.write_bytes(file, content.encode())
        try:
            _check("run.folder", file, content.encode(), writes)
        finally:
            with suppress(OSError, StorageError):  # the error of the check is more useful
                files.remove(file)


def _check(key: str, file: StoragePath, content: bytes, writes: Mapping[Role, bool]) -> None:
    master = socket.gethostname()
    checks = [
        transport.create(role, check_folder, key, file, content, will_write, master, timeout_seconds=_SECONDS)
        for role, will_write in writes.items()
    ]
    transport.gather(checks)
