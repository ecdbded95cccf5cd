"""The files of a checkpoint: their names, and writing and checking them. Free of torch."""

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

from hybrid.errors import CheckpointError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import RemotePath, StoragePath

MANIFEST_FILE = "manifest.json"
DENSE_FILE = "dense.safetensors"
REMOTE_FILE = "remote.safetensors"
PROGRESS_FILE = "progress.safetensors"
_EARLIER = "earlier."
_MAX_NAME_BYTES = 255  # of file systems
_PREFIX_BYTES = 100

# Files by their path relative to the checkpoint, with their size in bytes and their SHA-256.
Files: TypeAlias = dict[str, tuple[int, str]]


def shard_file(table: str, index: int, count: int) -> str:
    """Return the relative path of the file with one shard of a table.

    If the table's name is too long for a file name, a prefix and a hash of it stand for it.
    """
    name, end = quote(table, safe=""), f".{index}-of-{count}.safetensors"
    if len(name) + len(end) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(table.encode()).hexdigest()
        name = f"{name[:_PREFIX_BYTES]}%-{digest}"  # no quoted name contains "%-"
    return f"tables/{name}{end}"


def pre_update_file(worker: int) -> str:
    """The file with what the last update has changed of a worker's rows, as they were before it."""
    return f"{_EARLIER}{worker}.safetensors"


def is_pre_update_file(name: str) -> bool:
    """Whether it is one of :func:`pre_update_file`."""
    return name.startswith(_EARLIER)


def dense_file(trainer: int) -> str:
    """The file with a trainer's dense net; others than the first have one only where nets are their own."""
    return f"dense.{trainer}.safetensors" if trainer else DENSE_FILE


def write_text(folder: StoragePath, name: str, text: str) -> Files:
    """Write a text file of ``folder`` and see it safely stored."""
    path, content = folder / name, text.encode()
    with write_errors(path):
        storage.write_bytes(path, content)
    return {name: (len(content), hashlib.sha256(content).hexdigest())}


def write_copy(folder: StoragePath, name: str, source: Path) -> Files:
    """Write a file of ``folder`` that is as one of this machine, and see it safely stored."""
    path = folder / name
    with write_errors(path):
        storage.copy(source, path)
        return {name: (source.stat().st_size, storage.compute_checksum(source))}


@contextmanager
def write_errors(path: StoragePath) -> Iterator[None]:
    """Turn an OSError in here into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: StoragePath, error: OSError, missing_bytes: int = 0) -> CheckpointError:
    """What to raise where a file cannot be written, with how much room it lacks where that is known."""
    room = error.errno in (errno.ENOSPC, errno.EDQUOT) and missing_bytes
    more = f" ({missing_bytes:,} bytes of it are missing)" if room else ""
    return CheckpointError(f"cannot write {path}: {error.strerror or error}{more}")


def damage_error(path: StoragePath) -> CheckpointError:
    """What to raise for a file that is not as it was."""
    return CheckpointError(f"{path}: missing or altered since the checkpoint was written")


def find_mismatch(folder: StoragePath, files: Files) -> StoragePath | None:
    """The first file that is missing, or has another size than it had; None where all are right."""
    if isinstance(folder, RemotePath):
        there = {each.path: each.size for each in storage.list_entries(folder, is_deep=True)}
        return next(
            (folder / name for name, (size, _) in files.items() if there.get(folder / name) != size), None
        )
    for path, size in ((folder / name, size) for name, (size, _) in files.items()):
        try:
            if not (path.is_file() and path.stat().st_size == size):
                return path
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return None
