"""Locks of run folders, and folders that are created atomically. Does not import torch.

An atomic folder is built beside its target, under the name ``.building-TARGET``. The process that builds it
holds the lock ``TARGET.lock``, which the system releases when the process ends.
"""

import atexit
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from hybrid.errors import ConfigError, StorageError
from hybrid.storage import files
from hybrid.storage.private_files import make_folder, open_file, sync

LOCK_FILE = ".lock"
_WAIT_SECONDS = 1.0  # the roles of a killed launch hold the lock for some milliseconds
_POLL_SECONDS = 0.02
_UNFINISHED, _LOCK_SUFFIX = ".building-", ".lock"
_BUILD_POLL_SECONDS = 0.2


@contextmanager
def folder_lock(folder: Path, key: str = "run.folder", wait_seconds: float = _WAIT_SECONDS) -> Iterator[int]:
    """Create a run folder if it is missing, lock it, and yield the file descriptor of the lock.

    The processes of a launched run inherit the descriptor. If the launcher is killed, the system keeps the
    lock until these processes have ended, so no other run writes to the folder. When the context ends,
    folders that were created for the lock are removed if they are empty.

    Raises:
        ConfigError: another run holds the lock longer than ``wait_seconds``, or the folder cannot be created.
            The error names the configuration key ``key``.
        StorageError: the lock file is a symbolic link, or not a regular file.
    """
    path = folder / LOCK_FILE
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    deadline = time.monotonic() + wait_seconds
    try:
        make_folder(folder)
        while (descriptor := try_lock(path)) is None:
            if time.monotonic() >= deadline:
                rule = "is in use by another run; stop that run, or choose another folder"
                raise ConfigError(key, rule, str(folder))
            time.sleep(_POLL_SECONDS)
    except StorageError:
        raise
    except OSError as error:
        rule = f"cannot be created: {error.strerror}; choose another folder"
        raise ConfigError(key, rule, str(folder)) from error
    try:
        yield descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        with suppress(OSError):  # not empty, since they contain a run
            for each in missing:
                each.rmdir()


@cache
def lock_until_exit(folder: Path, key: str) -> None:
    """Lock a run folder, as :func:`folder_lock`, until this process ends. A second call has no effect."""
    lock = ExitStack()
    descriptor = lock.enter_context(folder_lock(folder, key))
    atexit.register(lock.close)

    def leave_to_parent() -> None:  # processes of a DataLoader may outlive this one by seconds
        atexit.unregister(lock.close)
        os.close(descriptor)

    os.register_at_fork(after_in_child=leave_to_parent)


def try_lock(path: Path) -> int | None:
    """Try once to lock a file, created if missing. Return its descriptor, or None without success."""
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file, and another process may have created a new one.
        if os.path.samestat(path.stat(), os.fstat(descriptor)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Wait for the lock file ``PATH.lock``, and keep it locked inside the context. Create missing folders."""
    make_folder(path.parent)
    lock = path.with_name(path.name + _LOCK_SUFFIX)
    while (descriptor := try_lock(lock)) is None:
        time.sleep(_BUILD_POLL_SECONDS)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def build_directory(target: Path) -> Iterator[Path | None]:
    """Yield an empty folder, which is renamed to ``target`` at the end, or removed after an exception.

    If another process is building ``target``, wait for that process. If ``target`` exists, yield None.
    Remove unfinished folders that killed processes have left beside ``target``.
    """
    with ExitStack() as stack:
        if not (is_built := target.exists()):
            stack.enter_context(hold_lock(target))
            is_built = target.exists()
        if is_built:
            yield None
            return
        folder = target.with_name(_UNFINISHED + target.name)
        for other in target.parent.glob(f"{_UNFINISHED}*"):
            lock = target.with_name(other.name.removeprefix(_UNFINISHED) + _LOCK_SUFFIX)
            if (descriptor := try_lock(lock)) is not None:  # never the lock of ``target``, which is held
                shutil.rmtree(other, ignore_errors=True)
                lock.unlink(missing_ok=True)
                os.close(descriptor)
        files.remove(folder)
        try:
            make_folder(folder)
            yield folder
            for parent, _, names in os.walk(folder):  # so that the rename is safe
                for name in (*names, "."):
                    sync(Path(parent, name))
            os.rename(folder, target)
            sync(target.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
