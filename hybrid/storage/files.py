"""Reading, writing, listing and removing: files of this machine and of stores alike.

What is missing is FileNotFoundError, all else that goes wrong an OSError, as of the disk; a store's is a
StorageError, whose text says what to do. A file of a store is visible once it is complete, at its name.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar, cast

from hybrid.errors import StorageError
from hybrid.storage.object_stores import asking, content_of, listed
from hybrid.storage.remote_files import RemoteFile, writing_remote
from hybrid.storage.remote_path import RemotePath, StoragePath

# What is asked for at a time, and how many such requests are under way: a request takes some 50 ms to begin.
_BLOCK_BYTES = 16 << 20
_REQUESTS = 6
_WAITING = 16  # small requests, most of which is waiting

Item = TypeVar("Item")
Result = TypeVar("Result")


class Writer(Protocol):
    """What a file is written by, which pyarrow can do, too."""

    @property
    def closed(self) -> bool: ...

    def write(self, content: bytes | memoryview, /) -> int:
        """Add to it."""
        ...


class Entry(NamedTuple):
    """A file or folder in a folder.

    Attributes:
        place: where it is.
        size: in bytes; 0 of a folder.
        mtime_ns: when it was last written; 0 where the store does not say.
        is_folder: whether it is one.
    """

    place: StoragePath
    size: int
    mtime_ns: int
    is_folder: bool


def find_entry(place: StoragePath) -> Entry | None:
    """What there is at a place; None for nothing, but StorageError where its bucket is not there."""
    if not isinstance(place, RemotePath):
        try:
            status = place.stat()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # the last of a text that names no file
            return None
        except OSError as error:
            raise _unusable(place, error) from error
        is_folder = stat.S_ISDIR(status.st_mode)
        return Entry(place, 0 if is_folder else status.st_size, status.st_mtime_ns, is_folder)
    with asking(place, "found") as (filesystem, path):
        found = _entry(place, filesystem.get_file_info(path))
    if found is None:
        _remote_entries(place, is_deep=False)  # of which a bucket that is not there makes an error
    return found


def _unusable(path: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"{path}: cannot be used: {reason}; correct the path, or its permissions", reason)


def exists(place: StoragePath) -> bool:
    """Whether there is something."""
    return find_entry(place) is not None


def is_file(place: StoragePath) -> bool:
    """Whether there is a file."""
    found = find_entry(place)
    return found is not None and not found.is_folder


def require_file(place: StoragePath) -> Entry:
    """A file; FileNotFoundError where there is none."""
    found = find_entry(place)
    if found is None or found.is_folder:
        raise FileNotFoundError(2, "No such file", str(place))
    return found


def file_size(place: StoragePath) -> int:
    """The size of a file in bytes; FileNotFoundError where there is none."""
    return require_file(place).size


def list_entries(folder: StoragePath, *, is_deep: bool = False) -> list[Entry]:
    """What is in a folder, by name; nothing where there is none.

    Args:
        is_deep: all files below it, and no folders.
    """
    if not isinstance(folder, RemotePath):
        is_there = (found := find_entry(folder)) is not None and found.is_folder
        try:
            paths = list(folder.rglob("*") if is_deep else folder.iterdir()) if is_there else []
        except OSError as error:
            raise _unusable(folder, error) from error
        every = [each for path in paths if (each := find_entry(path)) is not None]
    else:
        every = _remote_entries(folder, is_deep)
    return sorted((e for e in every if not (is_deep and e.is_folder)), key=lambda each: str(each.place))


def _remote_entries(folder: RemotePath, is_deep: bool) -> list[Entry]:
    with asking(folder, "listed") as (filesystem, path):
        infos = listed(filesystem, path, is_deep)
    start = len(path.rstrip("/")) + 1
    named = {info.path[start:].rstrip("/"): info for info in infos}
    found = [_entry(folder / name, info) for name, info in named.items() if is_deep or "/" not in name]
    if not is_deep:  # folders by what is in them, where a store lists no others
        inside = {name.partition("/")[0] for name in named if "/" in name} - named.keys()
        found += [Entry(folder / name, 0, 0, True) for name in inside]
    return [each for each in found if each is not None]


def _entry(place: RemotePath, info: Any) -> Entry | None:
    if info.type.name == "NotFound":
        return None
    return Entry(place, info.size or 0, info.mtime_ns or 0, info.type.name == "Directory")


def content_tag(place: RemotePath) -> str:
    """What a store calls the content that a file has now, of S3 its ETag; empty where it calls it nothing."""
    with asking(place, "read") as (filesystem, path), filesystem.open_input_file(path) as file:
        return content_of(file.metadata() or {}, filesystem.type_name)


def map_concurrently(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What ``work``, which mostly waits for files, makes of each item, in their order; of some at a time."""
    with ThreadPoolExecutor(_WAITING, "files") as threads:
        return list(threads.map(work, items))


def read_bytes(place: StoragePath) -> bytes:
    """All of a file, which is small."""
    with open_reader(place) as file:
        return file.read()


def read_text(place: StoragePath) -> str:
    """All of a text, which is small."""
    return read_bytes(place).decode()


@contextmanager
def open_reader(place: StoragePath, ahead: int = _BLOCK_BYTES) -> Iterator[IO[bytes]]:
    """Open a file for reading: from its beginning to its end, or wherever one seeks.

    Args:
        ahead: how many bytes are fetched from a store at least; 0 for those that are asked for.
    """
    if not isinstance(place, RemotePath):
        with place.open("rb") as local_file:
            yield local_file
        return
    with RemoteFile(place) as raw:
        yield io.BufferedReader(raw, ahead) if ahead else cast(IO[bytes], raw)


def read_range(place: StoragePath, start: int, length: int) -> bytes:
    """Some bytes of a file, from ``start`` on; fewer where it ends before."""
    return next(read_ranges(place, [(start, length)]))


def read_ranges(place: StoragePath, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Ranges of a file, starts and lengths, in their order; of a store, some at a time ahead of need."""
    if not isinstance(place, RemotePath):
        with place.open("rb", buffering=0) as local_file:
            for start, length in ranges:
                yield os.pread(local_file.fileno(), length, start)
        return
    with asking(place, "read") as (filesystem, path):
        file = filesystem.open_input_file(path)

    def read(start: int, length: int) -> bytes:
        with asking(place, "read"):
            content: bytes = file.read_at(length, start)
            return content

    with file, ThreadPoolExecutor(_REQUESTS, "store") as threads:
        wanted, under_way = iter(ranges), deque[Future[bytes]]()
        try:
            while True:
                more = islice(wanted, _REQUESTS - len(under_way))
                under_way.extend(threads.submit(read, *each) for each in more)
                if not under_way:
                    return
                yield under_way.popleft().result()
        finally:
            for each in under_way:
                each.cancel()


def read_blocks(place: StoragePath) -> Iterator[bytes]:
    """All of a file, in its order, in blocks of some MiB."""
    num_bytes = file_size(place)
    starts = range(0, num_bytes, _BLOCK_BYTES)
    return read_ranges(place, ((start, min(_BLOCK_BYTES, num_bytes - start)) for start in starts))


def compute_checksum(place: StoragePath) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    for block in read_blocks(place):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def local_copy(place: StoragePath, sha256: str | None = None) -> Iterator[Path]:
    """A path of this machine where a file can be read, and mapped into memory.

    That of a file here is its own. Another is fetched into the folder of temporary files (``TMPDIR``), where
    it has no name: its path is good in here only, maps of it last, and nothing is left of it after a kill.

    Args:
        sha256: that a file which is fetched must have.

    Raises:
        ValueError: it has another checksum.
    """
    if not isinstance(place, RemotePath):
        yield place
        return
    digest = hashlib.sha256()
    with tempfile.TemporaryFile(prefix="hybrid-") as file:
        for block in read_blocks(place):
            digest.update(block)
            file.write(block)
        file.flush()
        if sha256 is not None and digest.hexdigest() != sha256:
            raise ValueError("it is not as it was written")
        yield Path(f"/proc/self/fd/{file.fileno()}")


@contextmanager
def open_writer(place: StoragePath) -> Iterator[Writer]:
    """Write a file, and see it safely stored at the end; where that fails, nothing is left of it."""
    if isinstance(place, RemotePath):
        with writing_remote(place) as stream:
            yield stream
        return
    try:
        with place.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            place.unlink(missing_ok=True)
        raise


def write_bytes(place: StoragePath, content: bytes) -> None:
    """Write a small file: of a store in one request, so that readers see the old one or the new one."""
    with open_writer(place) as file:
        file.write(content)


def remove(place: StoragePath) -> None:
    """Remove a file, or a folder with all that is in it; nothing where there is none."""
    if not isinstance(place, RemotePath):
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        return
    with asking(place, "removed") as (filesystem, path), suppress(FileNotFoundError):
        found = filesystem.get_file_info(path)
        if found.type.name == "Directory":
            filesystem.delete_dir(path)
        elif found.type.name == "File":
            filesystem.delete_file(path)


def copy(source: StoragePath, target: StoragePath) -> None:
    """Copy a file."""
    with open_writer(target) as file:
        for block in read_blocks(source):
            file.write(block)


def make_folder(folder: StoragePath) -> None:
    """Make a folder, in one that is there; a store has folders by their files alone."""
    if not isinstance(folder, RemotePath):
        folder.mkdir()
