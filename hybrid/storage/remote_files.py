"""A file of a store: read as Python's own files are, or written from its beginning to its end."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Any

from hybrid.storage.object_stores import asking
from hybrid.storage.remote_path import RemotePath

_UNSENT_BYTES = 64 << 20


class RemoteFile(io.RawIOBase):
    """A file of a store as Python's own files are; errors of the store come out of its methods only."""

    def __init__(self, place: RemotePath) -> None:
        self._place = place
        with asking(place, "read") as (filesystem, path):
            self._file = filesystem.open_input_file(path)
            self._size = self._file.size()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        with asking(self._place, "read"):
            content = self._file.read_at(min(len(view), self._size - self._at), self._at)
        view[: len(content)] = content
        self._at += len(content)
        return len(content)

    def readall(self) -> bytes:
        with asking(self._place, "read"):
            content: bytes = self._file.read_at(self._size - self._at, self._at)
        self._at += len(content)
        return content

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = min(max(start + offset, 0), self._size)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _Stream:
    """A file of a store that is being written; it is there once it is closed."""

    def __init__(self, place: RemotePath) -> None:
        self._place = place
        self._unsent = 0
        with asking(place, "written") as (filesystem, path):
            # Azure shows a file from its first byte on: it is written in a folder of its own, and copied.
            folder, _, name = path.rpartition("/")
            self._apart = f"{folder}/.{name}.{token_hex(4)}" if filesystem.type_name == "abfs" else None
            written = path if self._apart is None else f"{self._apart}/part"
            # As it is, whatever its name ends in.
            self._stream = filesystem.open_output_stream(written, compression=None)

    @property
    def closed(self) -> bool:
        is_closed: bool = self._stream.closed
        return is_closed

    def write(self, content: bytes | memoryview, /) -> int:
        """See :class:`hybrid.storage.files.Writer`."""
        num_bytes = memoryview(content).nbytes
        with asking(self._place, "written"):
            self._stream.write(content)
            self._unsent += num_bytes
            if self._apart is not None and self._unsent >= _UNSENT_BYTES:
                self._stream.flush()  # else Azure's keeps all that the network has not taken yet
                self._unsent = 0
        return num_bytes

    def close(self) -> None:
        with asking(self._place, "written") as (filesystem, path):
            self._stream.close()
            if self._apart is not None:
                filesystem.copy_file(f"{self._apart}/part", path)
                filesystem.delete_dir(self._apart)

    def abandon(self) -> None:
        """Leave nothing of it. A stream can only be closed, which makes a file of what it has."""
        with suppress(OSError), asking(self._place, "removed") as (filesystem, path):
            self._stream.close()
            if self._apart is not None:
                filesystem.delete_dir(self._apart)
            else:
                filesystem.delete_file(path)


@contextmanager
def writing_remote(place: RemotePath) -> Iterator[_Stream]:
    """Write a file of a store, which is there at the end; where that fails, nothing is left of it."""
    stream = _Stream(place)
    try:
        yield stream
        stream.close()
    except BaseException:
        stream.abandon()
        raise
