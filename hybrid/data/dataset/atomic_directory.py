"""A directory that appears atomically; what killed processes left is removed, or used again."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybrid.errors import ClusterError, OutageError
from hybrid.storage.private_files import make_folder, sync

_PREFIX, _SEGMENTS_PREFIX = ".building-", ".parts-"
_LOCK = ".lock"


@contextmanager
def build_directory(target: Path, marker: str) -> Iterator[Path]:
    """Yield a folder that becomes ``target`` at the end; on failure nothing is left.

    The process holds a lock on a file beside the folder. The system releases it when the process ends.

    Args:
        marker: name of a file in every complete ``target``; if it exists at the end, another process was
            first, and its folder stays.

    Raises:
        OSError: the disk refuses.
    """
    make_folder(target.parent)
    remove_abandoned(target.parent)
    folder = target.parent / f"{_PREFIX}{target.name}-{uuid.uuid4().hex}"
    lock = lock_beside(folder)
    try:
        make_folder(folder)
        yield folder
        sync_all(folder)
        try:
            os.rename(folder, target)
        except OSError:
            if not (target / marker).exists():
                raise
        sync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _lock_path(folder).unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def keep_segments(target: Path, other: Path) -> Iterator[Path]:
    """Yield a folder for the parsed segments of ``target``; it holds those of a preparation that was killed.

    The folder is removed at the end, and on a failure that would occur again. It stays after an interrupt,
    a kill, or the loss of the cluster or of a store. The segments of data sets that no process prepares any
    more are removed.

    Args:
        other: the folder to yield if another process has locked the first one.
    """
    folder = target.parent / f"{_SEGMENTS_PREFIX}{target.name}"
    for path in target.parent.glob(f"{_SEGMENTS_PREFIX}*{_LOCK}"):
        if path != _lock_path(folder):
            _remove_unlocked(_folder_of(path))
    try:
        lock = lock_beside(folder, wait=False)
    except BlockingIOError:
        yield other
        return
    try:
        make_folder(folder)
        try:
            yield folder
        except (ClusterError, OutageError):  # the segments are valid
            raise
        except Exception:
            _remove(folder)
            raise
        _remove(folder)
    finally:
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the unfinished folders of killed processes."""
    for lock in parent.glob(f"{_PREFIX}*{_LOCK}"):
        _remove_unlocked(_folder_of(lock))
    for folder in parent.glob(f"{_PREFIX}*"):
        if not folder.name.endswith(_LOCK) and not _lock_path(folder).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder and its lock, if no process holds the lock."""
    try:
        lock = lock_beside(folder, create=False, wait=False)
    except (BlockingIOError, FileNotFoundError):  # its process lives, or has just finished
        return
    try:
        _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_path(folder).unlink(missing_ok=True)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _folder_of(lock: Path) -> Path:
    return lock.with_name(lock.name.removesuffix(_LOCK))


def lock_beside(folder: Path, *, create: bool = True, wait: bool = True) -> int:
    """Return the descriptor of the locked file beside ``folder``.

    Args:
        create: whether to create a missing file; else FileNotFoundError.
        wait: whether to wait while another process holds the lock; else BlockingIOError.
    """
    path = _lock_path(folder)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The holder before may have removed the file, and another process may have created a new one.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Sync everything in a folder to disk, so that a rename of the folder is safe."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))
