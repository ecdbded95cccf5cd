"""Predictions as a file, block by block: CSV, or Parquet where its name ends so; or as standard output."""

import csv
import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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

ROW = "row"  # the column that counts the rows of the input
STDOUT = Path("-")  # in the place of a file
_PARQUET = ".parquet"
_BETWEEN_VALUES, _BETWEEN_PAIR = "|", ":"  # of a list, in a field of a CSV


class PredictionWriter(Protocol):
    """Takes the columns of a file, some rows after the other."""

    def write(self, columns: Mapping[str, Any]) -> None:
        """Add rows.

        Args:
            columns: pyarrow arrays of one length, by name; the same names each time.
        """
        ...


def prediction_file(output: StoragePath) -> AbstractContextManager[PredictionWriter]:
    """A file to write; it is there once all is written, and else nothing is left of it.

    To :data:`STDOUT` rows go as they are written. Where nobody reads them any more, the process ends.

    Raises:
        HybridError: it cannot be written.
    """
    return _standard_output() if output == STDOUT else _file(output)


@contextmanager
def _standard_output() -> Iterator[PredictionWriter]:
    try:
        # Not sys.stdout, which goes on where nothing can be written any more.
        with open(1, "w", newline="", encoding="utf-8", closefd=False) as text:
            yield _CsvWriter(text, end="\n", at_once=True)
    except BrokenPipeError:
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        raise HybridError(f"standard output: cannot be written: {error.strerror}") from error


@contextmanager
def _file(output: StoragePath) -> Iterator[PredictionWriter]:
    try:
        with _sent(output) if isinstance(output, RemotePath) else _renamed(output) as file:
            if output.suffix == _PARQUET:
                with _ParquetWriter(file) as writer:
                    yield writer
            else:
                with io.TextIOWrapper(file, newline="", encoding="utf-8") as text:
                    yield _CsvWriter(text)
    except (OSError, ValueError, pa.ArrowException) as error:  # of other types than before, too
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise HybridError(f"{output}: cannot be written: {reason}") from error


@contextmanager
def _renamed(output: Path) -> Iterator[IO[bytes]]:
    """A file of this machine that has its name once it is whole."""
    partial = output.with_name(f".{output.name}.partial")
    try:
        with open(partial, "wb", opener=open_file) as file:
            yield file
        partial.rename(output)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _sent(output: RemotePath) -> Iterator[IO[bytes]]:
    """A file of a store, which is there once it is whole: one upload, as it is written."""
    with open_writer(output) as stream, _Upload(stream) as file:
        yield cast(IO[bytes], file)


class _Upload(io.RawIOBase):
    """As Python's own files are written; whoever has begun the upload ends it."""

    def __init__(self, stream: Writer) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return self._stream.write(content)


class _CsvWriter:
    def __init__(self, file: IO[str], end: str = "\r\n", at_once: bool = False) -> None:
        self._writer = csv.writer(file, lineterminator=end)
        self._file = file
        self._at_once = at_once
        self._has_header = False

    def write(self, columns: Mapping[str, Any]) -> None:
        if not self._has_header:
            self._writer.writerow(columns)
            self._has_header = True
        values = [_texts(column) for column in columns.values()]
        self._writer.writerows(zip(*values, strict=True))
        if self._at_once:
            self._file.flush()


def _texts(column: Any) -> list[Any]:
    if not is_list(column):
        return list(column.to_pylist())
    return [None if each is None else _BETWEEN_VALUES.join(map(_text, each)) for each in column.to_pylist()]


def _text(item: Any) -> str:
    """An item of a list; of a pair, as of an id and its weight, both."""
    return _BETWEEN_PAIR.join(map(str, item.values())) if isinstance(item, dict) else str(item)


class _ParquetWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writer: Any = None

    def __enter__(self) -> "_ParquetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, columns: Mapping[str, Any]) -> None:
        table = pa.table(dict(columns))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, table.schema)
        self._writer.write_table(table)
