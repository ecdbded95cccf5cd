"""``metrics.jsonl``: one JSON object per record of a run. Does not import torch."""

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from hybrid.storage import files
from hybrid.storage.file_formats import parse_json, replace_non_finite
from hybrid.storage.private_files import open_file

METRICS_FILE = "metrics.jsonl"
NO_NUMBERS = ("kind", "phase_seconds", "unit")  # fields of a record that are no numbers
_MAX_LOG_BYTES = 1 << 30

# Fields of a line of metrics.jsonl, or of restarts.jsonl.
Record: TypeAlias = dict[str, Any]


class AppendOnlyFile:
    """A file to which records are appended; created if it is missing.

    Args:
        make_room: called if the disk is full; returns whether to try again.

    Raises:
        StorageError: the path is a symbolic link, or not a regular file.
        OSError: the file cannot be opened. Methods raise it if a system call fails.
    """

    def __init__(self, path: Path, make_room: Callable[[], bool]) -> None:
        self._path = path
        self._make_room = make_room
        self._descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def append(self, kind: str, step: int, numbers: Mapping[str, float], **more: Any) -> None:
        """Append a record of metrics.jsonl with the current time. Numbers that are not finite become null."""
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **numbers, **more}
        self.write(f"{json.dumps(replace_non_finite(record), allow_nan=False)}\n".encode())

    def write(self, record: bytes) -> None:
        """Append bytes. If that fails, the file is truncated to its previous size."""
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
        except OSError as error:
            with suppress(OSError):  # a file that cannot be truncated stays as it is
                os.ftruncate(self._descriptor, end)
            error.filename = str(self._path)
            raise

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_records(path: Path) -> list[Record]:
    """Return the intact records of a file; [] if there is no file. StorageError if it exceeds 1 GiB."""
    lines = files.read_bytes(path, _MAX_LOG_BYTES).rpartition(b"\n")[0] if path.is_file() else b""
    return parse_records(lines)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Replace the content of a file by ``records``, one JSON object per line."""
    files.write_bytes(path, "".join(f"{json.dumps(record)}\n" for record in records).encode())


def parse_records(lines: bytes) -> list[Record]:
    """Return the records in lines, except lines that a killed process or a power cut has damaged."""
    records = []
    for line in lines.split(b"\n"):
        with suppress(ValueError):
            records.append(parse_json(line))
    return [each for each in records if isinstance(each, dict)]
