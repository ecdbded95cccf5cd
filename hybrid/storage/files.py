"""Functions to read, write, list and remove files of this machine and of object stores.

A missing file raises FileNotFoundError. If a store fails, or a local path is refused or cannot be read, the
functions raise StorageError. They refuse devices, FIFOs, and without ``follows_links`` also links. Other
failures, such as a full disk, raise OSError. A new file is visible once it is complete.
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
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, cast

from hybrid.errors import StorageError
from hybrid.storage.object_stores import RemoteReader, list_store, open_remote_writer, store_request
from hybrid.storage.private_files import open_file
from hybrid.storage.remote_path import RemotePath, StoragePath

if TYPE_CHECKING:
    from pyarrow import fs

# The bytes of one request, and the number of concurrent requests. A request takes about 50 ms to begin.
BLOCK_BYTES = 16 << 20
_REQUESTS = 6
_SMALL_REQUESTS = 16  # concurrent requests that mostly wait
MAX_SMALL_BYTES = 64 << 20  # of a file that is read at once
_MAX_PARTIAL_NAME = 200  # the limit of file systems is 255

Item = TypeVar("Item")
Result = TypeVar("Result")
Writer: TypeAlias = IO[bytes]  # a file of a store has only ``write``, ``close`` and ``closed``


class Entry(NamedTuple):
    """A file or folder in a listing."""

    path: StoragePath
    # Bytes of a file; 0 for a folder; -1 for a FIFO, a device, or a link that was found by listing a folder.
    size: int
    mtime_ns: int  # time of the last write; 0 if the store does not report it
    is_folder: bool

    @property
    def is_file(self) -> bool:
        return not self.is_folder and self.size >= 0


def find_entry(path: StoragePath) -> Entry | None:
    """Return the file or folder at ``path``; follow a link. None if nothing is there."""
    if not isinstance(path, RemotePath):
        try:
            with _path_errors(path):
                status = path.stat()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the path has a null byte
            return None
        is_folder = stat.S_ISDIR(status.st_mode)
        size = 0 if is_folder else status.st_size if stat.S_ISREG(status.st_mode) else -1
        return Entry(path, size, status.st_mtime_ns, is_folder)
    with store_request(path, "found") as (filesystem, key):
        entry = _to_entry(path, filesystem.get_file_info(key))
    if entry is None:
        _list_remote(path, is_deep=False)  # raises an error if the bucket does not exist
    return entry


@contextmanager
def _path_errors(path: Path) -> Iterator[None]:
    """Convert an OSError in the context to a StorageError, unless the path is missing."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, StorageError):
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        rule = "correct the path, or its permissions"
        raise StorageError(f"{path}: cannot be used: {reason}; {rule}", reason) from error


def exists(path: StoragePath) -> bool:
    return find_entry(path) is not None


def is_file(path: StoragePath) -> bool:
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
    """Return the entries of a folder (``is_deep``: all files below it), sorted by path; [] if missing."""
    if isinstance(folder, RemotePath):
        entries = _list_remote(folder, is_deep)
    elif (entry := find_entry(folder)) is None or not entry.is_folder:
        return []
    else:
        with _path_errors(folder):
            paths = list(folder.rglob("*") if is_deep else folder.iterdir())
        entries = [Entry(path, -1, 0, False) if path.is_symlink() else find_entry(path) for path in paths]
    existing = (each for each in entries if each is not None and not (is_deep and each.is_folder))
    return sorted(existing, key=lambda each: str(each.path))


def _list_remote(folder: RemotePath, is_deep: bool) -> list[Entry | None]:
    with store_request(folder, "listed") as (filesystem, key):
        infos = list_store(filesystem, key, is_deep)
    start = len(key.rstrip("/")) + 1
    by_name = {info.path[start:].rstrip("/"): info for info in infos}
    entries = [_to_entry(folder / name, info) for name, info in by_name.items() if is_deep or "/" not in name]
    if not is_deep:  # some stores list no folders: derive them from the names of the files below
        folders = {name.partition("/")[0] for name in by_name if "/" in name} - by_name.keys()
        entries += [Entry(folder / name, 0, 0, True) for name in folders]
    return entries


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
    """Call ``function`` for each item, in up to 16 threads; return the results in the order of ``items``."""
    with ThreadPoolExecutor(_SMALL_REQUESTS, "files") as threads:
        return list(threads.map(function, items))


def read_bytes(path: StoragePath, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """Return the content of a small file; StorageError if it has more than ``max_bytes``."""
    with open_reader(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        reason = f"has more than {max_bytes >> 20} MiB, so this program did not write it; remove it"
        raise StorageError(f"{path}: {reason}", reason)
    return content


def read_text(path: StoragePath) -> str:
    return read_bytes(path).decode()


@contextmanager
def open_reader(
    path: StoragePath, root: StoragePath | None = None, *, follows_links: bool = False
) -> Iterator[IO[bytes]]:
    """Open a file for reading. Each ``read`` of a remote file requests only the bytes of this call.

    Args:
        root, follows_links: only for a local file; see :func:`hybrid.storage.private_files.open_file`.
    """
    if not isinstance(path, RemotePath):
        with _path_errors(path):
            descriptor = open_file(path, root=cast(Path | None, root), follows_links=follows_links)
        with os.fdopen(descriptor, "rb") as local_file:
            yield local_file
        return
    with RemoteReader(path) as remote_file:
        yield cast(IO[bytes], remote_file)


def read_blocks(path: StoragePath, root: StoragePath | None = None) -> Iterator[bytes]:
    """Yield the blocks of a file, from a store concurrently; ``root`` is as for :func:`open_reader`."""
    if not isinstance(path, RemotePath):
        with open_reader(path, root) as file:
            while block := file.read(BLOCK_BYTES):
                yield block
        return
    starts = range(0, require_file(path).size, BLOCK_BYTES)
    read = RemoteReader(path).read_at
    with ThreadPoolExecutor(_REQUESTS, "store") as threads:
        pending = deque[Future[bytes]]()
        for start in starts:
            pending.append(threads.submit(read, start, BLOCK_BYTES))
            if len(pending) == _REQUESTS:
                yield pending.popleft().result()
        yield from (each.result() for each in pending)


def compute_checksum(path: StoragePath, root: StoragePath | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal; ``root`` is as for :func:`open_reader`."""
    digest = hashlib.sha256()
    for block in read_blocks(path, root):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def local_copy(
    path: StoragePath,
    sha256: str | None = None,
    root: StoragePath | None = None,
    *,
    follows_links: bool = False,
) -> Iterator[Path]:
    """Yield a local path from which a library can read a file, or map it into memory.

    A remote file is first copied into an unnamed file in ``TMPDIR``, which the system removes. The path is
    valid only inside the context; memory maps stay valid.

    Args:
        sha256: the expected checksum; ValueError if a remote file has another. Local files are not checked.
        root, follows_links: only for a local file; see :func:`hybrid.storage.private_files.open_file`.
    """
    if not isinstance(path, RemotePath):
        with open_reader(path, root, follows_links=follows_links) as local_file:
            yield Path(f"/proc/self/fd/{local_file.fileno()}")
        return
    digest = hashlib.sha256()
    with tempfile.TemporaryFile(prefix="hybrid-") as file:
        for block in read_blocks(path):
            digest.update(block)
            file.write(block)
        file.flush()
        if sha256 is not None and digest.hexdigest() != sha256:
            raise ValueError("the checksum differs")
        yield Path(f"/proc/self/fd/{file.fileno()}")


@contextmanager
def open_writer(path: StoragePath) -> Iterator[Writer]:
    """Open a new file for writing, which replaces the file at ``path`` when the context ends.

    A local file is flushed to the disk first. After an exception, the file at ``path`` is unchanged. A link
    is replaced, not followed.
    """
    if isinstance(path, RemotePath):
        with open_remote_writer(path) as stream:
            yield cast(Writer, stream)
        return
    # The name is fixed, so this process removes the unfinished file of a killed process.
    partial = path.with_name(f".{path.name[-_MAX_PARTIAL_NAME:]}.unfinished")
    try:
        partial.unlink(missing_ok=True)
        with os.fdopen(open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_bytes(path: StoragePath, content: bytes) -> None:
    """Write a small file atomically: readers see either the old or the new content."""
    with open_writer(path) as file:
        file.write(content)


def remove(path: StoragePath) -> None:
    """Remove a file, a link, or a folder with its content; do nothing if the path is missing."""
    if not isinstance(path, RemotePath):
        if path.is_dir() and not path.is_symlink():
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
    with open_writer(target) as file:
        for block in read_blocks(source):
            file.write(block)
