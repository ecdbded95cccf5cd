"""The input files of a run, and checks that they do not change."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hybrid.config import DataSection
from hybrid.config.splits import PATH_KEYS, TRAIN
from hybrid.errors import ConfigError, DataError, StorageError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path

SAMPLED_BLOCKS = 32
SAMPLED_BLOCK_BYTES = 32 << 10


@contextmanager
def convert_read_errors(path: StoragePath) -> Iterator[None]:
    """Convert errors of reading a file to DataError; a StorageError stays."""
    try:
        yield
    except (MemoryError, StorageError):
        raise
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({error}); check the file and data.format") from error


def compute_sampled_checksum(path: StoragePath) -> str:
    """Return a checksum of the size and of 32 blocks of 32 KiB, evenly spread, first and last included.

    A file of at most 1 MiB is read completely. In a larger file, changes between the blocks are not detected.
    """
    digest = hashlib.sha256()
    with storage.open_reader(path) as file:
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
    """The identity of an input file.

    Attributes:
        path: as the user names it, or its URL.
        real_path: the absolute path without links.
        size, modified_ns: as the system, or the store, reports them.
        sampled: :func:`compute_sampled_checksum`, or the tag of the content in its store
            (:func:`hybrid.storage.files.content_tag`).
    """

    path: str
    real_path: str
    size: int
    modified_ns: int
    sampled: str

    @classmethod
    def of(cls, path: StoragePath) -> InputFile:
        """Read the identity of a file; DataError or StorageError if it cannot be read."""
        with convert_read_errors(path):
            found = storage.require_file(path)
            if isinstance(path, RemotePath):
                real_path, sampled = str(path), storage.content_tag(path) or compute_sampled_checksum(path)
            else:
                real_path, sampled = str(path.resolve()), compute_sampled_checksum(path)
        return cls(str(path), real_path, found.size, found.mtime_ns, sampled)


def list_files(paths: Sequence[str], key: str) -> tuple[StoragePath, ...]:
    """Return the files of ``paths``; a folder stands for its files, sorted by name, without hidden files.

    Args:
        paths: local paths or URLs.
        key: the configuration key of the paths, for messages.

    Raises:
        ConfigError: ``paths`` is empty.
        DataError: a path does not exist or is no regular file, or a folder is empty or contains a folder.
        StorageError: a store refuses the request.
    """
    if not paths:
        raise ConfigError(key, "must name at least one file or folder")
    files: list[StoragePath] = []
    for path in map(parse_path, paths):
        found = storage.find_entry(path)
        if found is None:
            raise DataError(f"{path}: no such file or folder; check {key}")
        inside = {path: False}
        if found.is_folder:
            if isinstance(path, RemotePath):
                inside = {each.path: each.is_folder for each in storage.list_entries(path)}
            else:
                inside = {each: each.is_dir() for each in path.iterdir()}
            inside = {each: is_folder for each, is_folder in inside.items() if each.name[0] not in "._"}
            if not inside:
                raise DataError(f"{path}: the folder holds no files; check {key}")
        for each, is_folder in sorted(inside.items(), key=lambda entry: entry[0].name):
            # A subfolder may hold training rows or test rows. The user must decide.
            if is_folder:
                raise DataError(
                    f"{each}: is a subfolder, and subfolders are not read; add its path to {key}, or move it"
                )
            # A pipe, a socket or a device cannot be read twice.
            if isinstance(each, Path) and each.exists() and not each.is_file():
                raise DataError(f"{each}: is not a regular file; check {key}")
            files.append(each)
    return tuple(files)


def find_input_files(data: DataSection) -> dict[str, tuple[InputFile, ...]]:
    """Return the files of each split of ``data``.

    Raises:
        ConfigError: a key names no files, or two splits have the same file.
        DataError: as :func:`list_files`, or a file cannot be read.
    """
    files: dict[str, tuple[InputFile, ...]] = dict.fromkeys(data.splits, ())
    if data.format == "synthetic":
        return files
    for split in files:
        if not (paths := data.paths[split]) and split != TRAIN:
            continue
        key = PATH_KEYS[split]
        found = tuple(storage.map_concurrently(InputFile.of, list_files(paths, key)))
        for file in found:
            for other, each in ((other, each) for other, others in files.items() for each in others):
                if each.real_path == file.real_path or (each.size and each.sampled == file.sampled):
                    same = f"has the same content as {each.path} of {PATH_KEYS[other]}"
                    rule = f"{same}; name a file with other rows"
                    raise ConfigError(key, rule, file.path)
        files[split] = found
    return files


def check_unchanged(files: Sequence[InputFile]) -> None:
    """Raise DataError if a file has changed since ``files`` were listed."""
    now = storage.map_concurrently(lambda file: InputFile.of(parse_path(file.path)), files)
    for file, found in zip(files, now, strict=True):
        if found != file:
            raise DataError(f"{file.path}: has changed while it was read; start again once it is complete")
