"""Functions to read, write, list and remove files of this machine and of object stores.

A missing file raises FileNotFoundError, any other failure OSError. A failure of a store, or a path that the
system refuses, raises StorageError with advice. A file of a store becomes visible when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from hybrid.errors import StorageError
from hybrid.storage.object_stores import RemoteReader, list_store, open_remote_writer, store_request
from hybrid.storage.remote_path import RemotePath, StoragePath

if TYPE_CHECKING:
    from pyarrow import fs

# The bytes of one request, and the number of concurrent requests. A request takes about 50 ms to begin.
BLOCK_BYTES = 16 << 20
_REQUESTS = 6
_SMALL_REQUESTS = 16  # concurrent requests that mostly wait

Item = TypeVar("Item")
Result = TypeVar("Result")


class Writer(Protocol):
    """A file that is being written, also by pyarrow."""

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""

    def write(self, content: bytes | memoryview, /) -> int:
        """Append bytes to the file."""


class Entry(NamedTuple):
    """A file or folder in a listing.

    Attributes:
        path: its path.
        size: in bytes; 0 for a folder, -1 for what is neither a file nor a folder, such as a FIFO.
        mtime_ns: time of the last write; 0 if the store does not report it.
        is_folder: whether it is a folder.
    """

    path: StoragePath
    size: int
    mtime_ns: int
    is_folder: bool

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return not self.is_folder and self.size >= 0


def find_entry(path: StoragePath) -> Entry | None:
    """Return the file or folder at a path, or None if there is none.

    Raises:
        StorageError: the bucket does not exist, or the system or the store refuses.
    """
    if not isinstance(path, RemotePath):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the path has a null byte
            return None
        except OSError as error:
            raise _path_error(path, error) from error
        is_folder = stat.S_ISDIR(status.st_mode)
        size = 0 if is_folder else status.st_size if stat.S_ISREG(status.st_mode) else -1
        return Entry(path, size, status.st_mtime_ns, is_folder)
    with store_request(path, "found") as (filesystem, key):
        entry = _to_entry(path, filesystem.get_file_info(key))
    if entry is None:
        _list_remote(path, is_deep=False)  # raises an error if the bucket does not exist
    return entry


def _path_error(path: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"{path}: cannot be used: {reason}; correct the path, or its permissions", reason)


def exists(path: StoragePath) -> bool:
    """Return whether there is a file or folder at a path."""
    return find_entry(path) is not None


def is_file(path: StoragePath) -> bool:
    """Return whether there is a regular file at a path."""
    entry = find_entry(path)
    return entry is not None and entry.is_file


def require_file(path: StoragePath) -> Entry:
    """Return the entry of a regular file; FileNotFoundError if there is none."""
    entry = find_entry(path)
    if entry is None or not entry.is_file:
        reason = "No such file" if entry is None else "Is not a regular file"
        raise FileNotFoundError(errno.ENOENT, reason, str(path))
    return entry


def list_entries(folder: StoragePath, *, is_deep: bool = False) -> list[Entry]:
    """Return the entries of a folder, sorted by name; none if there is no such folder.

    Args:
        is_deep: list all files below the folder instead, without folders.
    """
    if isinstance(folder, RemotePath):
        entries = _list_remote(folder, is_deep)
    else:
        entry = find_entry(folder)
        try:
            paths = (
                list(folder.rglob("*") if is_deep else folder.iterdir()) if entry and entry.is_folder else []
            )
        except OSError as error:
            raise _path_error(folder, error) from error
        entries = [each for path in paths if (each := find_entry(path)) is not None]
    return sorted((e for e in entries if not (is_deep and e.is_folder)), key=lambda each: str(each.path))


def _list_remote(folder: RemotePath, is_deep: bool) -> list[Entry]:
    with store_request(folder, "listed") as (filesystem, key):
        infos = list_store(filesystem, key, is_deep)
    start = len(key.rstrip("/")) + 1
    by_name = {info.path[start:].rstrip("/"): info for info in infos}
    entries = [_to_entry(folder / name, info) for name, info in by_name.items() if is_deep or "/" not in name]
    if not is_deep:  # some stores list no folders: derive them from the names of the files below
        folders = {name.partition("/")[0] for name in by_name if "/" in name} - by_name.keys()
        entries += [Entry(folder / name, 0, 0, True) for name in folders]
    return [each for each in entries if each is not None]


def _to_entry(path: RemotePath, info: fs.FileInfo) -> Entry | None:
    if info.type.name == "NotFound":
        return None
    return Entry(path, info.size or 0, info.mtime_ns or 0, info.type.name == "Directory")


def content_tag(path: RemotePath) -> str:
    """Return the store's tag of the current content of a file, such as S3's ETag; empty if there is none."""
    with store_request(path, "read") as (filesystem, key), filesystem.open_input_file(key) as file:
        metadata = file.metadata() or {}
    keys = {"s3": ("ETag",), "gcs": ("md5Hash", "crc32c"), "abfs": ("Content-Hash",)}
    tags = (metadata.get(name) for name in keys.get(filesystem.type_name, ()))
    return next((tag.decode() for tag in tags if tag), "")


def map_concurrently(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results of a function that mostly waits for files, in the order of the items."""
    with ThreadPoolExecutor(_SMALL_REQUESTS, "files") as threads:
        return list(threads.map(function, items))


def read_bytes(path: StoragePath) -> bytes:
    """Return the content of a small regular file; reading a FIFO would block."""
    if not isinstance(path, RemotePath):
        require_file(path)
    with open_reader(path) as file:
        return file.read()


def read_text(path: StoragePath) -> str:
    """Return the content of a small text file."""
    return read_bytes(path).decode()


@contextmanager
def open_reader(path: StoragePath) -> Iterator[IO[bytes]]:
    """Open a file for reading; a read from a store is one request, for no more than the requested bytes."""
    if not isinstance(path, RemotePath):
        with path.open("rb") as local_file:
            yield local_file
        return
    with RemoteReader(path) as remote_file:
        yield cast(IO[bytes], remote_file)


def open_ranges(path: StoragePath) -> Callable[[int, int], bytes]:
    """Return a function of a start and a length that reads a range of a file, in any thread."""
    if isinstance(path, RemotePath):
        return RemoteReader(path).read_at

    def read(start: int, length: int) -> bytes:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), length, start)

    return read


def read_blocks(path: StoragePath) -> Iterator[bytes]:
    """Yield the content of a file in blocks; several requests to a store are sent in advance."""
    starts = range(0, require_file(path).size, BLOCK_BYTES)
    read = open_ranges(path)
    if not isinstance(path, RemotePath):
        yield from (read(start, BLOCK_BYTES) for start in starts)
        return
    with ThreadPoolExecutor(_REQUESTS, "store") as threads:
        pending = deque[Future[bytes]]()
        for start in starts:
            pending.append(threads.submit(read, start, BLOCK_BYTES))
            if len(pending) == _REQUESTS:
                yield pending.popleft().result()
        yield from (each.result() for each in pending)


def compute_checksum(path: StoragePath) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    for block in read_blocks(path):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def local_copy(path: StoragePath, sha256: str | None = None, folder: Path | None = None) -> Iterator[Path]:
    """Yield a path of this machine where a file can be read and mapped into memory.

    A remote file is fetched into a file without a name, which the system removes. The path is valid only
    inside the context; memory maps stay valid.

    Args:
        sha256: the checksum that a fetched file must have.
        folder: the folder of the fetched file; by default that of temporary files (``TMPDIR``).

    Raises:
        ValueError: the checksum differs.
    """
    if not isinstance(path, RemotePath):
        yield path
        return
    digest = hashlib.sha256()
    with tempfile.TemporaryFile(dir=folder, prefix="hybrid-") as file:
        for block in read_blocks(path):
            digest.update(block)
            file.write(block)
        file.flush()
        if sha256 is not None and digest.hexdigest() != sha256:
            raise ValueError("the checksum differs")
        yield Path(f"/proc/self/fd/{file.fileno()}")


@contextmanager
def open_writer(path: StoragePath) -> Iterator[Writer]:
    """Open a file for writing, and flush it to the disk at the end; a failure leaves no file."""
    if isinstance(path, RemotePath):
        with open_remote_writer(path) as stream:
            yield stream
        return
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def write_bytes(path: StoragePath, content: bytes) -> None:
    """Write a small file; in a store by one request, so that readers see the old or the new content."""
    with open_writer(path) as file:
        file.write(content)


def remove(path: StoragePath) -> None:
    """Remove a file, or a folder with its content, if there is one."""
    if not isinstance(path, RemotePath):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        return
    with store_request(path, "removed") as (filesystem, key), suppress(FileNotFoundError):
        kind = filesystem.get_file_info(key).type.name
        if kind == "Directory":
            filesystem.delete_dir(key)
        elif kind == "File":
            filesystem.delete_file(key)


def copy(source: StoragePath, target: StoragePath) -> None:
    """Copy a file."""
    with open_writer(target) as file:
        for block in read_blocks(source):
            file.write(block)
