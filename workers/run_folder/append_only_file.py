"""A file to which records are added, each whole or not at all, so that it can be read after a full disk."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hybrid.storage.private_files import open_file

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class AppendOnlyFile:
    """Adds to a file, which is made where there is none.

    Args:
        make_room: called where the disk is full; whether there may be room now, and to try again.

    Raises:
        HybridError: it is a link.
        OSError: it cannot be opened; as all methods where the system refuses.
    """

    def __init__(self, path: Path, make_room: Callable[[], bool]) -> None:
        self._make_room = make_room
        self._descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def write(self, record: bytes) -> None:
        """Add a record; where that fails, nothing of it is in the file."""
        try:
            self._write(record)
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._make_room():
                raise
            self._write(record)

    def _write(self, record: bytes) -> None:
        end = os.fstat(self._descriptor).st_size
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):  # no more can be done for a file that cannot be cut
                os.ftruncate(self._descriptor, end)
            raise

    def sync(self) -> None:
        """See what has been written safely on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
