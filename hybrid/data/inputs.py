"""The input files of a run: which they are, and whether they still are what they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid.config import DataSection
from hybrid.data import checksums
from hybrid.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class InputFile:
    """What tells a file from what may take its place.

    Attributes:
        path: as the user names it.
        real_path: without links.
        size, modified_ns: as the system has them.
        sampled: see :func:`hybrid.data.checksums.sampled`.
        whole: a checksum of all of it (``data.checksum = whole``), or empty.
    """

    path: str
    real_path: str
    size: int
    modified_ns: int
    sampled: str
    whole: str

    @classmethod
    def of(cls, path: Path, is_whole: bool) -> InputFile:
        """What is at ``path`` now; DataError where it cannot be read."""
        try:
            status = path.stat()
            whole = checksums.whole(path) if is_whole else ""
            sampled = checksums.sampled(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error}); check the file and data.path") from error
        return cls(str(path), str(path.resolve()), status.st_size, status.st_mtime_ns, sampled, whole)

    def has_content_of(self, other: InputFile) -> bool:
        """Whether both hold the same, as far as their checksums tell."""
        both_whole = bool(self.whole and other.whole)
        return self.sampled == other.sampled and (self.whole == other.whole or not both_whole)


def list_files(paths: Sequence[str], key: str) -> tuple[Path, ...]:
    """The files that ``paths`` name, a folder standing for its files by name; hidden ones are left out.

    Raises:
        ConfigError: ``paths`` is empty; the message names ``key``, the configuration key they come from.
        DataError: a path does not exist, or a folder holds no file, or folders too.
    """
    if not paths:
        raise ConfigError(key, "must name at least one file or folder")
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            files += _files_in(path, key)
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path}: no such file or folder; check {key}")
    return tuple(files)


def _files_in(folder: Path, key: str) -> list[Path]:
    found = [path for path in sorted(folder.iterdir()) if path.name[0] not in "._"]
    # What they are for is not to be guessed: more of the same, days, or the test files.
    for path in found:
        if path.is_dir():
            raise DataError(
                f"{path}: is a folder in a folder, which is not read; name it in {key} if it is to be"
            )
    if not found:
        raise DataError(f"{folder}: the folder holds no files; check {key}")
    return found


def input_files(data: DataSection) -> tuple[tuple[InputFile, ...], tuple[InputFile, ...]]:
    """The training files and the test files of ``data``, as they are now.

    Raises:
        ConfigError: a key names no files, or a test file is a training file.
        DataError: as :func:`list_files`, or a file cannot be read.
    """
    if data.format == "synthetic":
        return (), ()
    is_whole = data.checksum == "whole"
    train = tuple(InputFile.of(path, is_whole) for path in list_files(data.path, "data.path"))
    paths = list_files(data.test_path, "data.test_path") if data.test_path else ()
    test = tuple(InputFile.of(path, is_whole) for path in paths)
    for file in test:
        same = (t for t in train if t.real_path == file.real_path or (t.size and t.has_content_of(file)))
        if (twin := next(same, None)) is not None:
            rule = f"holds what the training file {twin.path} holds; a test on training rows tells nothing"
            raise ConfigError("data.test_path", rule, file.path)
    return train, test


def check_unchanged(files: Sequence[InputFile]) -> None:
    """DataError where a file is not any more what it was when ``files`` were listed."""
    for file in files:
        if InputFile.of(Path(file.path), bool(file.whole)) != file:
            raise DataError(f"{file.path}: has changed while it was read; start again once it is complete")
