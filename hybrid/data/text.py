"""Delimited text in blocks of columns: fast, and exact about line numbers.

A block of whole lines is parsed by pyarrow, one thread, every field a string. A record is one line: a quoted
field cannot hold a line break, so a stray quote spoils its own line and not those after it.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv

from hybrid.data.bad_rows import BadRow, Reason
from hybrid.data.layout import Layout
from hybrid.errors import DataError

BLOCK_BYTES = 16 << 20
MAX_LINE_BYTES = 64 << 20
MAX_BLOCK_BYTES = 1 << 30
PEEK_BYTES = 1 << 20
PEEK_LINES = 100
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TableBlock(NamedTuple):
    """Consecutive rows of one file.

    Attributes:
        columns: the wanted columns by name, n rows each, as pyarrow arrays.
        lines: int64 (n,), 1-based line (Parquet: row) in the file.
        rows: int64 (n,), 0-based row in the block; bad rows count, blank lines and the header do not.
        num_rows: rows of the block, bad ones included.
        bad: the rows left out.
    """

    columns: dict[str, Any]
    lines: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    num_rows: int
    bad: list[BadRow]


def read_text(path: Path, layout: Layout, block_bytes: int = BLOCK_BYTES) -> Iterator[TableBlock]:
    """The wanted columns of a text file, plain or gzip, as blocks of strings.

    Raises:
        ConfigError: the file lacks a column.
        DataError: the file cannot be read.
    """
    names, header_lines = _column_names(path, layout)
    layout.require(names, path)
    parser = _Parser(names, layout)
    line = 1
    for block in _line_blocks(path, block_bytes):
        num_lines = block.count(b"\n")
        skip = max(0, min(num_lines, header_lines - line + 1))
        yield parser.parse(_Lines(block, line, skip))
        line += num_lines


class _Lines:
    """The lines of a block, and which of them are kept as rows.

    Args:
        block: whole lines, each ended by a line feed.
        first_line: number of the first one in the file.
        skip: how many at the start are header.
    """

    def __init__(self, block: bytes, first_line: int, skip: int) -> None:
        self._block = block.replace(b"\r", b"") if b"\r" in block else block
        self._bytes = np.frombuffer(self._block, np.uint8)
        self._ends = np.flatnonzero(self._bytes == ord("\n"))
        self._starts = np.concatenate([[0], self._ends[:-1] + 1])
        self._first_line = first_line
        self.keep = np.arange(len(self._ends)) >= skip

    def __getitem__(self, i: int) -> bytes:
        return self._block[self._starts[i] : self._ends[i]]

    def kept(self) -> bytes:
        """The kept lines, one after the other."""
        if self.keep.all():
            return self._block
        return b"".join(self[i] + b"\n" for i in np.flatnonzero(self.keep).tolist())

    def numbers(self) -> npt.NDArray[np.int64]:
        """Number in the file of each kept line."""
        return self._first_line + np.flatnonzero(self.keep)

    def drop_blank(self, num_columns: int, delimiter: str) -> None:
        """Keep no blank line, where rows have ``num_columns``."""
        # A row of n columns is at least n - 1 delimiters long, and a longer blank line starts with a blank
        # that is no delimiter: the other lines need no look.
        suspect = self._ends - self._starts < max(num_columns - 1, 1)
        for blank in {" ", "\t"} - {delimiter}:
            suspect |= self._bytes[self._starts] == ord(blank)
        for i in np.flatnonzero(suspect & self.keep).tolist():
            self.keep[i] = bool(self[i].strip())

    def drop_broken(self, fault: Callable[[bytes], str]) -> list[BadRow]:
        """Keep no line in which ``fault`` finds one; returns these lines."""
        broken = []
        for i in np.flatnonzero(self.keep).tolist():
            found = fault(self[i])
            if found:
                self.keep[i] = False
                broken.append(BadRow(self._first_line + i, Reason.TEXT, found))
        return broken

    def last(self) -> bytes:
        """The last kept line, or nothing."""
        kept = np.flatnonzero(self.keep)
        return self[int(kept[-1])] if len(kept) else b""

    def is_utf8(self) -> bool:
        """Whether every line is UTF-8 text."""
        return self._block.isascii() or _is_utf8(self._block)


class _Parser:
    """Turns lines into columns."""

    def __init__(self, names: Sequence[str], layout: Layout) -> None:
        self._width = len(names)
        self._layout = layout
        # Columns go by position within pyarrow: a header may hold the same name twice.
        keys = [str(i) for i in range(self._width)]
        self._wanted = {name: keys[names.index(name)] for name in layout.wanted}
        self._read = pacsv.ReadOptions(column_names=keys, use_threads=False, block_size=MAX_BLOCK_BYTES)
        self._convert = pacsv.ConvertOptions(
            column_types=dict.fromkeys(keys, pa.string()),
            include_columns=list(dict.fromkeys(self._wanted.values())),
            strings_can_be_null=False,
            check_utf8=False,
        )

    def parse(self, lines: _Lines) -> TableBlock:
        """The wanted columns of the rows of ``lines``."""
        lines.drop_blank(self._width, self._layout.delimiter)
        row_of_line = np.cumsum(lines.keep) - 1
        num_rows = int(lines.keep.sum())
        broken = [] if lines.is_utf8() else lines.drop_broken(self._fault)
        columns, bad = self._columns(lines.kept())
        # An open quote swallows the lines after it; in the last line it would pass unseen.
        if _num_rows(columns) + len(bad) != lines.keep.sum() or self._fault(lines.last()):
            broken += lines.drop_broken(self._fault)
            columns, bad = self._columns(lines.kept())
        at = [row.line for row in bad]
        numbers = lines.numbers()
        bad = [row._replace(line=int(numbers[row.line])) for row in bad]
        rows = np.delete(row_of_line[lines.keep], at)
        return TableBlock(columns, np.delete(numbers, at), rows, num_rows, broken + bad)

    def _columns(self, block: bytes) -> tuple[dict[str, Any], list[BadRow]]:
        """The wanted columns, and the rows (numbered from 0 in ``block``) of another number of columns."""
        bad: list[BadRow] = []

        def skip(row: Any) -> str:
            found = f"{row.actual_columns} column{'s' * (row.actual_columns != 1)}, expected {self._width}"
            bad.append(BadRow(row.number - 1, Reason.COLUMNS, found))
            return "skip"

        if not block:
            return {name: pa.array([], pa.string()) for name in self._wanted}, bad
        if block.startswith(_BYTE_ORDER_MARK):  # not that of the file, and pyarrow would drop it
            block = _BYTE_ORDER_MARK + block
        options = pacsv.ParseOptions(
            delimiter=self._layout.delimiter,
            quote_char='"' if self._layout.quotes else False,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        )
        table = pacsv.read_csv(pa.BufferReader(block), self._read, options, self._convert)
        return {name: table[key].combine_chunks() for name, key in self._wanted.items()}, bad

    def _fault(self, line: bytes) -> str:
        """What makes ``line`` impossible to split into fields; empty where nothing does."""
        if not _is_utf8(line):
            return "not UTF-8 text"
        if self._layout.quotes and b'"' in line:
            try:
                next(csv.reader([line.decode()], delimiter=self._layout.delimiter, strict=True))
            except csv.Error:
                return "a quote is not closed"
        return ""


def _is_utf8(block: bytes) -> bool:
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def _num_rows(columns: dict[str, Any]) -> int:
    return len(next(iter(columns.values())))


def _column_names(path: Path, layout: Layout) -> tuple[Sequence[str], int]:
    """The names of the file's columns by position, and how many lines the header takes with it."""
    with _reading(path) as file:
        head = file.read(PEEK_BYTES).decode("utf-8-sig", errors="replace")
    lines = enumerate(head.split("\n")[:PEEK_LINES], start=1)
    peeked = [(number, _split(line.strip("\r"), layout)) for number, line in lines if line.strip()]
    if not layout.columns:
        if not peeked:
            raise DataError(f"{path}: the file is empty, expected a header line; check data.path")
        number, fields = peeked[0]
        return [field.strip() for field in fields], number
    if not layout.with_labels:
        widths = [len(fields) for _, fields in peeked]
        if widths.count(len(layout.columns) - 1) > widths.count(len(layout.columns)):
            layout = layout.without_label()
    return layout.columns, 0


def _split(line: str, layout: Layout) -> list[str]:
    if not layout.quotes:
        return line.split(layout.delimiter)
    try:
        return next(csv.reader([line], delimiter=layout.delimiter), [])
    except csv.Error:  # a field beyond the csv module's limit: no header and no row
        return [line]


def _line_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """Whole lines in blocks of about ``block_bytes``, every line ended by a line feed."""
    with _reading(path) as file:
        rest = b""
        start = True
        while chunk := file.read(block_bytes):
            chunk = chunk.removeprefix(_BYTE_ORDER_MARK) if start else chunk
            start = False
            cut = chunk.rfind(b"\n") + 1
            if cut:
                yield rest + chunk[:cut]
                rest = chunk[cut:]
            else:
                rest += chunk
            if len(rest) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; is it a text file?"
                )
        if rest:
            yield rest + b"\n"


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """``path`` open for reading, unpacked where it is gzip; what goes wrong is a DataError."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield unpacked
            else:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); check the file and data.path") from error
