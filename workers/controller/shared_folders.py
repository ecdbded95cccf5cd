"""Checks, before the first step, that roles on other hosts see the folders that they share with the master.

::

    master                                      role on another host
    ──────                                      ────────────────────
    prepared data: checksum of the manifest   ► reads that manifest
    run folder: a file of random bytes,       ► reads it; a role that will write
      removed afterwards                          there writes and removes a file

Nothing is checked if all roles see the files of the master's host.
"""

import hashlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
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


class FolderCheck:
    """A check on a role: it reads a file that the master sees, and compares the content.

    Args:
        key: the configuration key of the folder.
        file: a file in this folder.
        digest: SHA-256 of the file on the master's host.
        writes: whether this role will write into the folder.
        master: name of the master's host.

    Raises:
        DataError, CheckpointError: the file is missing or different, or the folder cannot be written.
        StorageError: a request to a store fails.
    """

    def __init__(self, key: str, file: StoragePath, digest: str, writes: bool, master: str) -> None:
        host = socket.gethostname()
        kind = DataError if key == _DATA_KEY else CheckpointError
        rule = f"is a different folder than on the master's host {master} ({{}})"
        message = f"{file.parent} on host {host} {rule}; {key} must be storage that all hosts share"
        try:
            content = files.read_bytes(file)
            if writes:
                probe = file.parent / f"{file.name}-{secrets.token_hex(_TOKEN_BYTES)}"
                files.write_bytes(probe, b"")
                files.remove(probe)
        except StorageError as error:  # its message has the remedy
            raise type(error)(f"host {host}: {error}") from error
        except OSError as error:
            raise kind(message.format(error.strerror)) from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise kind(message.format("it holds other files"))


@dataclass(frozen=True, slots=True)
class SharedFolders:
    """Checks of the folders that all roles share."""

    remote_roles: Sequence[Role]  # roles on other hosts, or with other mounts, than the master

    def check_data(self, folder: StoragePath) -> None:
        """Check that all trainers see the master's prepared data; a store is visible to all.

        Raises:
            RemoteError: a trainer sees other data; the message names both hosts, the folder and the remedy.
        """
        trainers = [role for role in self.remote_roles if role.kind is RoleKind.TRAINER]
        if trainers and not isinstance(folder, RemotePath):
            manifest = folder.absolute() / FILE_NAME
            _check(_DATA_KEY, manifest, files.read_bytes(manifest), dict.fromkeys(trainers, False))

    def check_run(self, run: StoragePath) -> None:
        """Check that all roles see the run folder, and that roles that write checkpoints can write there.

        Raises:
            CheckpointError: the master cannot write into the folder.
            RemoteError: another role cannot see the folder, or cannot write into it.
        """
        if not self.remote_roles:
            return
        content = secrets.token_hex(_TOKEN_BYTES)
        file = run.absolute() / f"{_PREFIX}{content}"
        # Workers and at least the first trainer write a part of each checkpoint.
        writes = {role: role.kind is RoleKind.WORKER or role.index == 0 for role in self.remote_roles}
        with write_errors(file):
            files.write_bytes(file, content.encode())
        try:
            _check("run.folder", file, content.encode(), writes)
        finally:
            with suppress(OSError, StorageError):  # the error of the check is more useful
                files.remove(file)


def _check(key: str, file: StoragePath, content: bytes, writes: Mapping[Role, bool]) -> None:
    """Check a file on all roles; after all checks have ended, raise the first error."""
    master = socket.gethostname()
    digest = hashlib.sha256(content).hexdigest()
    checks = [
        transport.create(role, FolderCheck, key, file, digest, will_write, master, timeout_seconds=_SECONDS)
        for role, will_write in writes.items()
    ]
    errors = []
    for check in checks:
        try:
            check.wait()
        except (transport.RemoteError, transport.LostError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
