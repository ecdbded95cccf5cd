"""Whether roles elsewhere see the folders that they must share with the master: found before the first step.

::

    master                                      role on another host
    ──────                                      ────────────────────
    prepared data, by its manifest's checksum ► reads that manifest
    a file of random bytes, in the folder     ► reads it there; one that will write
      of checkpoints, and removes it              there writes a file and removes it

Where all roles are on the master's host, nothing is asked.
"""

import hashlib
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid import transport
from hybrid.checkpoint.checkpoint_files import write_errors
from hybrid.data.dataset.dataset_manifest import FILE_NAME
from hybrid.data.prepare.dataset_location import source_of
from hybrid.errors import CheckpointError, DataError, StorageError
from hybrid.storage import files
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import RemotePath, StoragePath, is_url
from hybrid.topology import Role, RoleKind

_PREFIX = ".seen-by-all-"
_TOKEN_BYTES = 16
_LOOK_SECONDS = 60.0  # a network file system may take its time


def own_files() -> str:
    """What processes have in common that see the same files: machine, and what is mounted where."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/mnt')}"


class DataLook:
    """Lives on a trainer; made there, it looks for the prepared data.

    Args:
        master: name of the master's host.
        checksum: of the manifest that the master sees.

    Raises:
        DataError: they are not there, or others.
    """

    def __init__(self, folder: Path, checksum: str, master: str) -> None:
        try:
            is_same = _checksum(folder) == checksum
        except OSError as error:
            raise DataError(_not_shared("data.cache_folder", folder, master, error.strerror)) from error
        if not is_same:
            raise DataError(_not_shared("data.cache_folder", folder, master, "it holds other data"))


class FolderLook:
    """Lives on a role; made there, it looks for the file that the master has left in a folder.

    Args:
        probe: that file.
        token: what it holds.
        writes: whether this role will write there.
        master: name of the master's host.

    Raises:
        CheckpointError: it is not there, or the folder cannot be written to.
        StorageError: a store does not do what it is asked from here.
    """

    def __init__(self, probe: StoragePath, token: str, writes: bool, master: str) -> None:
        folder = probe.parent
        try:
            is_same = files.read_text(probe) == token
            if writes:
                own = folder / f"{probe.name}-{secrets.token_hex(_TOKEN_BYTES)}"
                files.write_bytes(own, b"")
                files.remove(own)
        except StorageError as error:  # whose text has the remedy
            raise type(error)(f"host {socket.gethostname()}: {error}") from error
        except OSError as error:
            raise CheckpointError(_not_shared("run.folder", folder, master, error.strerror)) from error
        if not is_same:
            raise CheckpointError(_not_shared("run.folder", folder, master, "it holds other files"))


@dataclass(frozen=True, slots=True)
class Reach:
    """The roles that may see other files than the master does.

    Attributes:
        elsewhere: those that are not on its host, or not among what is mounted there.
    """

    elsewhere: Sequence[Role]

    def check_data(self, folder: Path) -> None:
        """See that all trainers find the prepared data that the master does; those in a store all can.

        Raises:
            RemoteError: one does not; it names both hosts, the folder and the remedy.
        """
        trainers = [role for role in self.elsewhere if role.kind is RoleKind.TRAINER]
        if trainers and not is_url(source_of(folder)):
            what = folder.absolute(), _checksum(folder), socket.gethostname()
            _gather(
                [transport.create(role, DataLook, *what, timeout_seconds=_LOOK_SECONDS) for role in trainers]
            )

    def check_checkpoints(self, folder: StoragePath) -> None:
        """See that all roles reach the folder of the run's checkpoints, and those that write can; as above.

        Raises:
            CheckpointError: the master cannot write there.
        """
        if not self.elsewhere:
            return
        here, token = socket.gethostname(), secrets.token_hex(_TOKEN_BYTES)
        with _made(folder), _probe(folder.absolute() / f"{_PREFIX}{token}", token) as probe:
            looks = []
            for role in self.elsewhere:
                what = probe, token, _writes(role), here
                looks.append(transport.create(role, FolderLook, *what, timeout_seconds=_LOOK_SECONDS))
            _gather(looks)


def _gather(looks: Sequence[transport.Pending[Any]]) -> None:
    """Wait for all, since a role that is still looking would find what is removed; the first error."""
    errors = []
    for look in looks:
        try:
            look.wait()
        except (transport.RemoteError, transport.RejectedCallError, transport.LostError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _writes(role: Role) -> bool:
    """Whether a role writes a part of each checkpoint; of trainers, at least the first does."""
    return role.kind is RoleKind.WORKER or role.index == 0


@contextmanager
def _made(folder: StoragePath) -> Iterator[None]:
    """A folder that is there meanwhile; what was not there before is not there afterwards."""
    if isinstance(folder, RemotePath):  # stores have none
        yield
        return
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    with write_errors(folder):
        make_folder(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # somebody else has put something there
            for each in missing:
                each.rmdir()


@contextmanager
def _probe(place: StoragePath, token: str) -> Iterator[StoragePath]:
    """A file that holds ``token`` meanwhile."""
    try:
        files.write_bytes(place, token.encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {place}: {error.strerror}") from error
    try:
        yield place
    except BaseException:
        with suppress(OSError, StorageError):  # the first error says more
            files.remove(place)
        raise
    files.remove(place)


def _checksum(folder: Path) -> str:
    return hashlib.sha256((folder / FILE_NAME).read_bytes()).hexdigest()


def _not_shared(key: str, folder: StoragePath, master: str, why: str | None) -> str:
    here = socket.gethostname()
    return (
        f"{folder} on host {here} is not that of the master's host {master} ({why}); {key} must be storage "
        "that all hosts share"
    )
