"""A file whose records are appended atomically, so that a full disk does not damage it."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hybrid.storage.private_files import open_file


class AppendOnlyFile:
    """Appends records to a file, which is created if it is missing.

    Args:
        make_room: called if the disk is full; returns whether to try again.

    Raises:
        HybridError: the path is a symbolic link.
        OSError: the file cannot be opened; all methods raise it if the system refuses.
    """

    def __init__(self, path: Path, make_room: Callable[[], bool]) -> None:
        self._make_room = make_room
        self._descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def write(self, record: bytes) -> None:
        """Append a record; a failure leaves nothing of it in the file."""
        try:
            self._write(record)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room():
                raise
            self._write(record)

    def _write(self, record: bytes) -> None:
        end = os.fstat(self._descriptor).st_size
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):  # a file that cannot be truncated stays as it is
                os.ftruncate(self._descriptor, end)
            raise

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
