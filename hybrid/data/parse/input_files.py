"""The input files of a run, and checks that they do not change."""

from __future__ import annotations

import glob
import hashlib
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import pyarrow as pa

from hybrid.config import DataSection
from hybrid.config.data_sections import JOINS, PATH_KEYS, TRAIN
from hybrid.errors import ConfigError, DataError, StorageError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path

_NULL = "__HIVE_DEFAULT_PARTITION__"
SAMPLED_BLOCKS = 32
SAMPLED_BLOCK_BYTES = 32 << 10
WHILE_READ = "has changed while it was read; start again once it is complete"


@contextmanager
def convert_read_errors(path: StoragePath) -> Iterator[None]:
    """Convert errors of reads and decompression to DataError, but pass on StorageError and MemoryError."""
    try:
        yield
    except (MemoryError, StorageError):
        raise
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({error}); check the file and data.format") from error


def compute_sampled_checksum(
    path: StoragePath, root: StoragePath | None = None, *, follows_links: bool = False
) -> str:
    """Return the SHA-256 of the size of a file and of 32 evenly spread blocks of 32 KiB.

    The checksum covers all bytes of a file of at most 1 MiB, but not the bytes between the blocks of a larger
    file. For ``root``, ``follows_links`` and errors, see :func:`hybrid.storage.private_files.open_file`.
    """
    digest = hashlib.sha256()
    with storage.open_reader(path, root, follows_links=follows_links) as file:
        size = file.seek(0, io.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - SAMPLED_BLOCK_BYTES)
        is_large = size > SAMPLED_BLOCKS * SAMPLED_BLOCK_BYTES
        for i in range(SAMPLED_BLOCKS):
            file.seek(last * i // (SAMPLED_BLOCKS - 1) if is_large else SAMPLED_BLOCK_BYTES * i)
            digest.update(file.read(SAMPLED_BLOCK_BYTES))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class InputFile:
    """Path, size, time and checksum of an input file, to detect changes and files of equal content."""

    path: str  # the path or URL that the user names
    real_path: str  # the absolute path without links, or the URL
    size: int  # bytes
    modified_ns: int  # time of the last change
    sampled: str  # result of compute_sampled_checksum, or the tag that an object store gives to the content

    @classmethod
    def of(cls, path: StoragePath) -> InputFile:
        """Read size, time and checksum of a file. Raise DataError or StorageError if a read fails."""
        with convert_read_errors(path):
            found = storage.require_file(path)
            if isinstance(path, RemotePath):
                real_path, sampled = str(path), storage.content_tag(path) or compute_sampled_checksum(path)
            else:
                real_path, sampled = str(path.resolve()), compute_sampled_checksum(path, follows_links=True)
        return cls(str(path), real_path, found.size, found.mtime_ns, sampled)

    def absolute(self) -> InputFile:
        """Return a copy with an absolute ``path``, for processes with other working directories."""
        return replace(self, path=str(parse_path(self.path).absolute()))


def path_columns(path: StoragePath) -> dict[str, str | None]:
    """Return the names and values of the folders ``NAME=VALUE`` of a path; Hive's null value becomes None."""
    pairs = [part.split("=", 1) for part in path_parts(path)[:-1] if _is_partition(part)]
    return {unquote(name): None if value == _NULL else unquote(value) for name, value in pairs}


def path_parts(path: StoragePath) -> list[str]:
    """Return the names of the folders and of the file in a path, or in the key of a stored object."""
    return path.key.split("/") if isinstance(path, RemotePath) else [*path.parts]


def _is_partition(name: str) -> bool:
    return "=" in name[1:] and name[0] != "."


def list_files(paths: Sequence[str], key: str) -> tuple[StoragePath, ...]:
    """Return the files at ``paths``, in this order. A folder is replaced by its files, sorted by path.

    Args:
        paths: local paths, URLs, or patterns such as ``day=*/part-?.csv``. Of a folder, hidden files are
            left out, and files in subfolders ``NAME=VALUE`` are included.
        key: the configuration key of the paths, for messages.

    Raises:
        ConfigError: ``paths`` is empty.
        DataError: a path is neither a regular file nor a folder, or a folder is unreadable, has no files, or
            has a visible subfolder whose name does not have the form ``NAME=VALUE``.
        StorageError: a store refuses a request, or the system refuses a path.
    """
    if not paths:
        raise ConfigError(key, "must name at least one file or folder")
    files: list[StoragePath] = []
    for path in chain.from_iterable(map(expand_pattern, paths)):
        found = storage.find_entry(path)
        if found is None:
            raise DataError(f"{path}: no such file or folder; check {key}")
        inside = _list_folder(path, key) if found.is_folder else [path]
        for each in inside:
            # A pipe, a socket or a device cannot be read twice.
            if isinstance(each, Path) and each.exists() and not each.is_file():
                raise DataError(f"{each}: is not a regular file; check {key}")
        files += inside
    return tuple(files)


def expand_pattern(text: str) -> list[StoragePath]:
    """Return the sorted paths that match the pattern ``text``, without hidden files and folders.

    If ``text`` is itself an existing path, or no path matches, return only ``text``.
    """
    path = parse_path(text)
    parts = path_parts(path)
    first = next((i for i, part in enumerate(parts) if re.search(r"[*?[]", part)), len(parts))
    if first == len(parts) or storage.exists(path):
        return [path]
    found: list[StoragePath]
    if isinstance(path, RemotePath):
        above = RemotePath(path.root, "/".join(parts[:first]), path.query)
        keys = {
            "/".join(path_parts(each.path)[: len(parts)])
            for each in storage.list_entries(above, is_deep=True)
        }
        matching = (key for key in keys if PurePosixPath("/", key).match(f"/{path.key}"))
        found = [RemotePath(path.root, key, path.query) for key in matching]
    else:
        found = [Path(each) for each in glob.glob(str(path))]
    visible = [each for each in found if all(map(_is_visible, path_parts(each)[first:]))]
    return sorted(visible, key=path_parts) or [path]


def _is_visible(name: str) -> bool:
    return name[0] not in "._" or _is_partition(name)


def _list_folder(folder: StoragePath, key: str) -> list[StoragePath]:
    def list_visible(folder: StoragePath) -> list[tuple[StoragePath, bool]]:
        with convert_read_errors(folder):
            if isinstance(folder, RemotePath):
                inside = [(each.path, each.is_folder) for each in storage.list_entries(folder)]
            else:
                inside = [(each, each.is_dir()) for each in folder.iterdir()]
        return [each for each in inside if _is_visible(each[0].name)]

    files: list[StoragePath] = []
    level = [folder]
    while level:
        inside = [*chain.from_iterable(storage.map_concurrently(list_visible, level))]
        files += [each for each, is_folder in inside if not is_folder]
        level = [each for each, is_folder in inside if is_folder]
        # Another subfolder may hold training rows or test rows. The user must decide.
        for each in level:
            if not _is_partition(each.name):
                rule = f"add its path to {key}, or move it"
                raise DataError(f"{each}: a subfolder without the form NAME=VALUE is not read; {rule}")
    if not files:
        raise DataError(f"{folder}: the folder holds no files; check {key}")
    return sorted(files, key=path_parts)


def find_input_files(data: DataSection) -> dict[str, tuple[InputFile, ...]]:
    """Return the files by split (such as ``train``). Files of side table N have the key ``data.joins[N]``.

    Raises:
        ConfigError: ``data.path`` or a side table names no path, or two splits have files of equal content.
        DataError, StorageError: a path has no files (:func:`list_files`), or a file cannot be read.
    """
    files: dict[str, tuple[InputFile, ...]] = dict.fromkeys(data.splits, ())
    if data.format == "synthetic":
        return files
    for split in data.splits:
        paths, key = data.paths[split], PATH_KEYS[split]
        if not paths and split != TRAIN:
            continue
        found = tuple(storage.map_concurrently(InputFile.of, list_files(paths, key)))
        for file, (other, others) in product(found, files.items()):
            for each in others:
                if each.real_path == file.real_path or (each.size and each.sampled == file.sampled):
                    same = f"has the same content as {each.path} of {PATH_KEYS[other]}"
                    raise ConfigError(key, f"{same}; name a file with other rows", file.path)
        files[split] = found
    return files | {f"{JOINS}[{i}]": each for i, each in enumerate(find_side_files(data))}


def find_side_files(data: DataSection) -> tuple[tuple[InputFile, ...], ...]:
    """Return the files of each side table of ``data.joins``; for errors, see :func:`find_input_files`."""
    lists = [list_files(call["path"], JOINS) for call in data.join_calls]
    return tuple(tuple(storage.map_concurrently(InputFile.of, paths)) for paths in lists)


def check_unchanged(files: Sequence[InputFile], message: str = WHILE_READ) -> None:
    """Raise DataError with ``message`` if a file has changed, or other errors if it cannot be read."""
    now = storage.map_concurrently(lambda file: InputFile.of(parse_path(file.path)), files)
    for file, found in zip(files, now, strict=True):
        if found != file:
            raise DataError(f"{file.path}: {message}")
