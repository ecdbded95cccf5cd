"""A folder that appears whole or not at all; what dead processes left is removed, or gone on with."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from hybrid.errors import ClusterError, OutageError
from hybrid.storage.files import remove
from hybrid.storage.private_files import make_folder, sync
from hybrid.storage.remote_path import RemotePath

_PREFIX, _PARTS_PREFIX = ".building-", ".parts-"
_LOCK = ".lock"


@contextmanager
def building(target: Path, marker: str) -> Iterator[Path]:
    """A folder to build in, which becomes ``target`` at the end; on failure nothing is left.

    Beside it lies a file that its process holds locked: the system lets go of it with the process.

    Args:
        marker: name of a file in every whole ``target``; where it is there by then, somebody was quicker.

    Raises:
        OSError: the disk refuses.
    """
    make_folder(target.parent)
    remove_abandoned(target.parent)
    folder = target.parent / f"{_PREFIX}{target.name}-{uuid.uuid4().hex}"
    lock = _lock(folder)
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
def parts_of_building(target: Path, other: Path) -> Iterator[Path]:
    """A folder for parts of what becomes ``target``; those are in it that a process had when it was killed.

    It is removed at the end, and on failure; whoever is interrupted or killed leaves it, or has lost its
    cluster, or a store. Parts of what nobody builds any more are removed.

    Args:
        other: the folder to take where another process is at it, which has that one locked.
    """
    folder = target.parent / f"{_PARTS_PREFIX}{target.name}"
    for path in target.parent.glob(f"{_PARTS_PREFIX}*{_LOCK}"):
        if path != _lock_path(folder):
            _remove_unlocked(_locked_by(path))
    try:
        lock = _lock(folder, wait=False)
    except BlockingIOError:
        yield other
        return
    try:
        make_folder(folder)
        with _removing(partial(_remove_parts, folder)):
            yield folder
    finally:
        os.close(lock)


@contextmanager
def sent_parts(target: RemotePath) -> Iterator[RemotePath]:
    """As :func:`parts_of_building`, beside ``target`` in its store, for parts that other hosts send.

    Nothing is locked there: who builds the same at the same time finds the same parts, or none any more.
    """
    folder = target.with_name(f"{_PARTS_PREFIX}{target.name}")
    with _removing(partial(remove, folder)):
        yield folder


@contextmanager
def _removing(remove_parts: Callable[[], None]) -> Iterator[None]:
    """Remove parts at the end, and on a failure that would come again."""
    try:
        yield
    except (ClusterError, OutageError):  # the parts are as good as before
        raise
    except Exception:
        with suppress(OSError):
            remove_parts()
        raise
    remove_parts()


def _remove_parts(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_path(folder).unlink(missing_ok=True)


def remove_abandoned(parent: Path) -> None:
    """Remove what processes that were killed have left half built."""
    for lock in parent.glob(f"{_PREFIX}*{_LOCK}"):
        _remove_unlocked(_locked_by(lock))
    for folder in parent.glob(f"{_PREFIX}*"):
        if not folder.name.endswith(_LOCK) and not _lock_path(folder).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder and the lock beside it, if nobody holds that."""
    try:
        lock = _lock(folder, make=False, wait=False)
    except (BlockingIOError, FileNotFoundError):  # its process lives, or has just finished
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
        _lock_path(folder).unlink()
    finally:
        os.close(lock)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _locked_by(lock: Path) -> Path:
    return lock.with_name(lock.name.removesuffix(_LOCK))


def _lock(folder: Path, *, make: bool = True, wait: bool = True) -> int:
    """The descriptor of the locked file beside ``folder``, which is there before the folder is.

    Args:
        make: whether it is made where it is missing; else FileNotFoundError.
        wait: for another who holds it; else BlockingIOError.
    """
    path = _lock_path(folder)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Somebody who had it before may have removed it, and another have made it anew.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """See all that is in a folder safely on the disk, so that it may be renamed."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))
