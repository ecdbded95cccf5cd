"""A lock that allows one launch at a time in a run folder."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybrid.errors import ConfigError
from hybrid.storage.private_files import make_folder, open_file

_NAME = ".lock"
_WAIT_SECONDS = 1.0  # the roles of a killed launch hold the lock for some milliseconds
_POLL_SECONDS = 0.02


@contextmanager
def run_lock(folder: Path) -> Iterator[int]:
    """Lock a run folder, which is made if it is missing, and yield the descriptor of the lock.

    The system releases the lock with the last process that has the descriptor, so it is never stale. Each
    role inherits the descriptor: no other launch writes to the folder while a role lives.

    Raises:
        ConfigError: another launch holds the lock, or the folder cannot be made.
    """
    path = folder / _NAME
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        make_folder(folder)
        descriptor = _acquire(path)
    except BlockingIOError as error:
        rule = "is in use by another launch; stop that one, or choose another folder"
        raise ConfigError("run.folder", rule, str(folder)) from error
    except OSError as error:
        rule = f"cannot be made: {error.strerror}; choose another folder"
        raise ConfigError("run.folder", rule, str(folder)) from error
    try:
        yield descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        with suppress(OSError):  # they are not empty: they contain a run
            for each in missing:
                each.rmdir()


def _acquire(path: Path) -> int:
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file that is locked now.
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise
        os.close(descriptor)
        time.sleep(_POLL_SECONDS)
