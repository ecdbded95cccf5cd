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
from hybrid.storage.remote_path import StoragePath

MANIFEST_FILE = "manifest.json"
DENSE_FILE = "dense.safetensors"
REMOTE_FILE = "remote.safetensors"
PROGRESS_FILE = "progress.safetensors"
_PRE_UPDATE = "earlier."
_MAX_NAME_BYTES = 255  # of file systems
_PREFIX_BYTES = 100

# The path of each file relative to the checkpoint, with its size in bytes and its SHA-256.
Files: TypeAlias = dict[str, tuple[int, str]]


def shard_file(table: str, index: int, count: int) -> str:
    """Return the relative path of the file with one shard of a table.

    If the table's name is too long for a file name, a prefix and a hash of it replace it.
    """
    name, end = quote(table, safe=""), f".{index}-of-{count}.safetensors"
    if len(name) + len(end) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(table.encode()).hexdigest()
        name = f"{name[:_PREFIX_BYTES]}%-{digest}"  # no quoted name contains "%-"
    return f"tables/{name}{end}"


def pre_update_file(worker: int) -> str:
    """Return the name of the file with a worker's rows before the last update."""
    return f"{_PRE_UPDATE}{worker}.safetensors"


def is_pre_update_file(name: str) -> bool:
    """Return whether a name is one of :func:`pre_update_file`."""
    return name.startswith(_PRE_UPDATE)


def dense_file(trainer: int) -> str:
    """Return the name of the file with a trainer's dense net; only the first has one if all are equal."""
    return f"dense.{trainer}.safetensors" if trainer else DENSE_FILE


def write_text(folder: StoragePath, name: str, text: str) -> Files:
    """Write a text file of a checkpoint, and flush it to the disk."""
    path, content = folder / name, text.encode()
    with write_errors(path):
        storage.write_bytes(path, content)
    return {name: (len(content), hashlib.sha256(content).hexdigest())}


def write_copy(folder: StoragePath, name: str, source: Path) -> Files:
    """Copy a file of this machine into a checkpoint, and flush it to the disk."""
    path = folder / name
    with write_errors(path):
        storage.copy(source, path)
        return {name: (source.stat().st_size, storage.compute_checksum(source))}


@contextmanager
def write_errors(path: StoragePath) -> Iterator[None]:
    """Convert an OSError in the context to a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: StoragePath, error: OSError, missing_bytes: int = 0) -> CheckpointError:
    """Return the error for a file that cannot be written, with the missing bytes if the disk is full."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and missing_bytes
    more = f" ({missing_bytes:,} bytes of it are missing)" if is_full else ""
    return CheckpointError(f"cannot write {path}: {error.strerror or error}{more}")


def damage_error(path: StoragePath) -> CheckpointError:
    """Return the error for a file whose size or checksum differs from the manifest."""
    return CheckpointError(f"{path}: missing or altered since the checkpoint was written")


def find_mismatch(folder: StoragePath, files: Files) -> StoragePath | None:
    """Return the first file that is missing or has another size than in the manifest, or None."""
    sizes = {each.path: each.size for each in storage.list_entries(folder, is_deep=True)}
    paths = ((folder / name, size) for name, (size, _) in files.items())
    return next((path for path, size in paths if sizes.get(path) != size), None)
