"""One launch at a time in a run folder."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybrid.errors import ConfigError
from hybrid.storage.private_files import make_folder, open_file

_NAME = ".lock"
# The roles of a launch that was killed hold it as long as they live, which is milliseconds.
_WAIT_SECONDS = 1.0
_POLL_SECONDS = 0.02


@contextmanager
def run_lock(folder: Path) -> Iterator[int]:
    """Hold a run folder, which is made where there is none; the descriptor of the lock.

    The system lets go of it with the last process that has the descriptor, so a lock is never stale. Roles
    are given it too: nobody else writes to the folder while one of them lives.

    Raises:
        ConfigError: somebody holds it, or the folder cannot be made.
    """
    path = folder / _NAME
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        make_folder(folder)
        descriptor = _acquire(path)
    except BlockingIOError as error:
        rule = "another launch is at work in it; stop that one, or choose another"
        raise ConfigError("run.folder", rule, str(folder)) from error
    except OSError as error:
        rule = f"cannot be made: {error.strerror}; choose another"
        raise ConfigError("run.folder", rule, str(folder)) from error
    try:
        yield descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        with suppress(OSError):  # they hold a run now
            for each in missing:
                each.rmdir()


def _acquire(path: Path) -> int:
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_there(path, descriptor):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise
        os.close(descriptor)
        time.sleep(_POLL_SECONDS)


def _is_still_there(path: Path, descriptor: int) -> bool:
    """Whether the file locked is the one at ``path``: who had it before has removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
