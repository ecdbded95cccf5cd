"""Locks between processes, and the lock of a run folder, which one run at a time holds. Without torch."""

import atexit
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from hybrid.errors import ConfigError, StorageError
from hybrid.storage.private_files import make_folder, open_file

LOCK_FILE = ".lock"
_WAIT_SECONDS = 1.0  # the roles of a killed launch hold the lock for some milliseconds
_POLL_SECONDS = 0.02


@contextmanager
def folder_lock(folder: Path, key: str = "run.folder", wait_seconds: float = _WAIT_SECONDS) -> Iterator[int]:
    """Lock a run folder, which is created if missing, and yield the descriptor of the lock.

    Each role inherits the descriptor, and the system releases the lock when the last process with it ends. So
    the lock is never stale, and no other run writes to the folder while a role lives.

    Args:
        key: what names the folder, for errors.

    Raises:
        ConfigError: another run holds the lock, or the folder cannot be created.
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
    """Lock a run folder until this process ends; see :func:`folder_lock`. Further calls have no effect."""
    lock = ExitStack()
    descriptor = lock.enter_context(folder_lock(folder, key))
    atexit.register(lock.close)

    def leave_to_parent() -> None:  # processes of a DataLoader may outlive this one by seconds
        atexit.unregister(lock.close)
        os.close(descriptor)

    os.register_at_fork(after_in_child=leave_to_parent)


def try_lock(path: Path) -> int | None:
    """Lock a file, which is created if missing; return its descriptor, or None if another process has it."""
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
