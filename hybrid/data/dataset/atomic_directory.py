"""Directories that appear atomically, and locks between processes.

A directory is built beside its target, under the name ``.building-TARGET``. Its process holds the lock
``TARGET.lock``, which the system releases when the process ends.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid.errors import ClusterError, OutageError
from hybrid.storage import files
from hybrid.storage.folder_lock import try_lock
from hybrid.storage.private_files import make_folder, sync

_PREFIX, _LOCK = ".building-", ".lock"
_POLL_SECONDS = 0.2


@contextmanager
def hold_lock(path: Path, check: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file of a path, then remove it. Call ``check`` while another process holds the lock."""
    make_folder(path.parent)
    lock = path.with_name(path.name + _LOCK)
    while (descriptor := try_lock(lock)) is None:
        check()
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def build_directory(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``target`` at the end; the caller holds the lock of ``target``.

    After an interrupt, a kill, or the loss of the cluster or of a store, the folder stays. The next call
    yields the folder with its files. Other failures would occur again, so the folder is removed.
    A folder with links is removed first. Folders for other targets whose locks are free are removed.
    """
    folder = target.with_name(_PREFIX + target.name)
    for other in target.parent.glob(f"{_PREFIX}*"):
        lock = target.with_name(other.name.removeprefix(_PREFIX) + _LOCK)
        if (descriptor := try_lock(lock)) is not None:  # never the lock of ``target``, which is held
            shutil.rmtree(other, ignore_errors=True)
            lock.unlink(missing_ok=True)
            os.close(descriptor)
    if folder.is_symlink() or any(path.is_symlink() for path in folder.rglob("*")):
        files.remove(folder)  # this program makes no links
    try:
        make_folder(folder)
        yield folder
        sync_all(folder)
        os.rename(folder, target)
        sync(target.parent)
    except (ClusterError, OutageError):  # the files are valid
        raise
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def sync_all(folder: Path) -> None:
    """Sync everything in a folder to disk, so that a rename of the folder is safe."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))
