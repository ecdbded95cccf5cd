"""Predictions as a CSV or Parquet file, or on standard output, written block by block."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from hybrid.data.values.column_values import is_list
from hybrid.errors import HybridError
from hybrid.storage.files import Writer, open_writer
from hybrid.storage.private_files import open_file
from hybrid.storage.remote_path import RemotePath, StoragePath
from workers.exit_codes import ExitCode

ROW = "row"  # the column of row numbers
STDOUT = Path("-")
_ITEM_SEPARATOR, _PAIR_SEPARATOR = "|", ":"  # of a list in a CSV field


class PredictionWriter(Protocol):
    """Writes the columns of a file, block by block."""

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append rows: pyarrow arrays of one length by name, with the same names each time."""
        ...


@contextmanager
def prediction_file(output: StoragePath) -> Iterator[PredictionWriter]:
    """Open a file that exists only once it is complete.

    Rows for :data:`STDOUT` are written at once; the process ends if nobody reads them any more.

    Raises:
        HybridError: the file cannot be written.
    """
    if output != STDOUT:
        with _file(output) as writer:
            yield writer
        return
    try:
        # sys.stdout would ignore errors at the end of the process.
        with open(1, "w", newline="", encoding="utf-8", closefd=False) as text:
            yield _CsvWriter(text, line_end="\n", flushes=True)
    except BrokenPipeError:
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        raise HybridError(f"standard output: cannot be written: {error.strerror}") from error


@contextmanager
def _file(output: StoragePath) -> Iterator[PredictionWriter]:
    try:
        with ExitStack() as stack:
            file: IO[bytes]
            if isinstance(output, RemotePath):
                upload = _UploadFile(stack.enter_context(open_writer(output)))
                file = cast(IO[bytes], stack.enter_context(upload))
            else:
                partial = output.with_name(f".{output.name}.partial")
                stack.callback(partial.unlink, missing_ok=True)
                file = stack.enter_context(open(partial, "wb", opener=open_file))
            if output.suffix == ".parquet":
                with _ParquetWriter(file) as writer:
                    yield writer
            else:
                with io.TextIOWrapper(file, newline="", encoding="utf-8") as text:
                    yield _CsvWriter(text)
            if not isinstance(output, RemotePath):
                file.close()
                partial.rename(output)
    except (OSError, ValueError, pa.ArrowException) as error:  # or a column that changes its type
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise HybridError(f"{output}: cannot be written: {reason}") from error


class _UploadFile(io.RawIOBase):
    """An upload with the interface of Python's files."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return self._writer.write(content)


class _CsvWriter:
    def __init__(self, file: IO[str], line_end: str = "\r\n", flushes: bool = False) -> None:
        self._writer = csv.writer(file, lineterminator=line_end)
        self._file = file
        self._flushes = flushes
        self._has_header = False

    def write(self, columns: Mapping[str, Any]) -> None:
        if not self._has_header:
            self._writer.writerow(columns)
            self._has_header = True
        self._writer.writerows(zip(*map(_fields, columns.values()), strict=True))
        if self._flushes:
            self._file.flush()


def _fields(column: Any) -> list[Any]:
    """Return the fields of a column; the items of a list, and an id and its weight, are joined."""
    if not is_list(column):
        return list(column.to_pylist())

    def text(item: Any) -> str:
        return _PAIR_SEPARATOR.join(map(str, item.values())) if isinstance(item, dict) else str(item)

    return [None if each is None else _ITEM_SEPARATOR.join(map(text, each)) for each in column.to_pylist()]


class _ParquetWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> _ParquetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, columns: Mapping[str, Any]) -> None:
        table = pa.table(dict(columns))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, table.schema)
        self._writer.write_table(table)
