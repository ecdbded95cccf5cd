"""Delimited text in blocks of columns: fast, and exact about line numbers.

A block of whole lines is parsed by pyarrow, one thread, every field a string. A record is one line. A quoted
field cannot hold a line break: where one does, its lines are one bad row. A stray quote spoils its own line
and not those after it.
"""

import csv
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv

from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.text_lines import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    GZIP_MAGIC,
    MAX_LINE_BYTES,
    MAX_RECORD_BYTES,
    OPEN_QUOTE,
    Lines,
    is_utf8,
    line_blocks,
    open_text,
    refuse_binary,
    whole_lines,
    without_returns,
)
from hybrid.data.values.invalid_rows import InvalidRow, Reason
from hybrid.errors import DataError
from hybrid.storage.remote_path import StoragePath

MAX_BLOCK_BYTES = 1 << 30
PEEK_BYTES = 1 << 20
PEEK_LINES = 100


class _Ended(NamedTuple):
    """Lines, and whether it is known that the last row of them is whole."""

    block: bytes
    ends_row: bool


class TableBlock(NamedTuple):
    """Consecutive rows of one file.

    Attributes:
        columns: the wanted columns by name, n rows each, as pyarrow arrays.
        lines: int64 (n,), 1-based line (Parquet: row) in the file.
        rows: int64 (n,), 0-based row in the block; bad rows count, blank lines and the header do not.
        num_rows: rows of the block, bad ones included.
        num_lines: lines that it takes in the file.
        bad: the rows left out.
    """

    columns: dict[str, Any]
    lines: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    num_rows: int
    num_lines: int
    bad: list[InvalidRow]


def read_text(path: StoragePath, layout: Layout, block_bytes: int = BLOCK_BYTES) -> Iterator[TableBlock]:
    """The wanted columns of a text file, plain or gzip, as blocks of strings.

    Raises:
        ConfigError: the file lacks a column.
        DataError: the file cannot be read.
    """
    with open_text(path) as file:
        head = file.read(PEEK_BYTES)
    yield from _tables(path, head, _open_ended(line_blocks(path, block_bytes)), layout)


def read_span(
    path: StoragePath, chunks: Iterator[bytes], layout: Layout, *, is_first: bool, is_last: bool
) -> Iterator[TableBlock]:
    """The wanted columns of a part of a text file; its lines are numbered from 1.

    Args:
        chunks: the bytes of the part; it begins and ends where :func:`record_start` says, or the file does.
        is_first, is_last: whether the file begins with the part, and ends with it.

    Raises:
        ConfigError, DataError: as in :func:`read_text`.
    """
    with open_text(path) as file:
        head = file.read(PEEK_BYTES)
    blocks = whole_lines(path, chunks, is_start=is_first)
    ended = _open_ended(blocks) if is_last else _ended(blocks)
    yield from _tables(path, head, ended, layout, is_first=is_first)


def record_start(path: StoragePath, at: int, layout: Layout) -> int:
    """Where the first row begins that is not whole in the bytes before ``at`` of a plain text file.

    Raises:
        ConfigError, DataError: as in :func:`read_text`.
    """
    with open_text(path) as file:
        names, _ = column_names(path, file.read(PEEK_BYTES), layout)
        layout.require(names, path)
        for size in (2 * MAX_RECORD_BYTES, MAX_LINE_BYTES + 2 * MAX_RECORD_BYTES):
            start = max(0, at - size)
            file.seek(start)
            window = file.read(at - start)
            end = window.rfind(b"\n") + 1
            if not start or end > size - MAX_RECORD_BYTES // 2:
                break
    if not end or not layout.quotes:
        return start + end if end else at
    cut = _Parser(names, layout).open_tail(without_returns(window[:end]))
    if cut is None:
        return start + end
    num_open = without_returns(window[:end])[cut:].count(b"\n")
    ends = np.flatnonzero(np.frombuffer(window[:end], np.uint8) == ord("\n"))
    return start + (int(ends[-num_open - 1]) + 1 if num_open < len(ends) else 0)


def read_stream(path: StoragePath, chunks: Iterator[bytes], layout: Layout) -> Iterator[TableBlock]:
    """The wanted columns of plain text that comes bit by bit, each row as soon as it is there.

    Args:
        path: what the text is called.
        chunks: the bytes of it, cut anywhere.

    Raises:
        ConfigError: it lacks a column.
        DataError: there is none, or it is no plain text.
    """
    blocks = whole_lines(path, chunks)
    head = b""
    for block in blocks:
        head += block
        if head.strip() or len(head) > PEEK_BYTES:
            break
    if head.startswith(GZIP_MAGIC):
        raise DataError(f"{path}: is packed by gzip; unpack it, such as by zcat")
    if not head.strip():
        raise DataError(f"{path}: no rows")
    yield from _tables(path, head, _open_ended(chain([head], blocks)), layout)


def _tables(
    path: StoragePath,
    head: bytes,
    blocks: Iterator[_Ended],
    layout: Layout,
    *,
    is_first: bool = True,
) -> Iterator[TableBlock]:
    """The wanted columns of the lines of ``blocks``; with ``head`` the file begins that they are part of."""
    names, header_lines = column_names(path, head[:PEEK_BYTES], layout)
    layout.require(names, path)
    parser = _Parser(names, layout)
    line = 1
    for block in parser.whole_records(blocks):
        lines = Lines(block, line, max(0, header_lines - line + 1) if is_first else 0)
        yield parser.parse(lines)
        line += lines.count


def _open_ended(blocks: Iterator[bytes]) -> Iterator[_Ended]:
    """``blocks`` none of which is known to end with a row."""
    return (_Ended(block, False) for block in blocks)


def _ended(blocks: Iterator[bytes]) -> Iterator[_Ended]:
    """``blocks`` the last of which ends with a row."""
    block = next(blocks, b"")
    for following in blocks:
        yield _Ended(block, False)
        block = following
    if block:
        yield _Ended(block, True)


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

    def whole_records(self, blocks: Iterator[_Ended]) -> Iterator[bytes]:
        """The same lines, in blocks none of which ends between lines that belong together."""
        rest = b""
        for each in blocks:
            block = rest + each.block
            cut = None if each.ends_row else self.open_tail(block)
            rest = b"" if cut is None else block[cut:]
            if whole := block[:cut]:
                yield whole
        if rest:
            yield rest

    def open_tail(self, block: bytes) -> int | None:
        """Where the lines begin at the end of ``block`` that belong to what follows, if any do."""
        if not self._layout.quotes or b'"' not in block[-MAX_RECORD_BYTES:]:
            return None
        return Lines(block, 1, 0).open_tail(self._fault, self._is_record)

    def parse(self, lines: Lines) -> TableBlock:
        """The wanted columns of the rows of ``lines``."""
        lines.drop_blank(self._width, self._layout.data.delimiter)
        row_of_line = np.cumsum(lines.keep) - 1
        num_rows = int(lines.keep.sum())
        broken = [] if lines.is_plain() else lines.drop_broken(self._fault, self._is_record)
        columns, bad = self._columns(lines.kept())
        # An open quote swallows the lines after it; in the last line it would pass unseen.
        num_read = len(next(iter(columns.values()))) + len(bad)
        if num_read != lines.keep.sum() or self._fault(lines.last()):
            broken += lines.drop_broken(self._fault, self._is_record)
            columns, bad = self._columns(lines.kept())
        at = [row.line for row in bad]
        numbers = lines.numbers()
        bad = [row._replace(line=int(numbers[row.line])) for row in bad]
        rows = np.delete(row_of_line[lines.keep], at)
        return TableBlock(columns, np.delete(numbers, at), rows, num_rows, lines.count, broken + bad)

    def _columns(self, block: bytes) -> tuple[dict[str, Any], list[InvalidRow]]:
        """The wanted columns, and the rows (numbered from 0 in ``block``) of another number of columns."""
        bad: list[InvalidRow] = []

        def skip(row: Any) -> str:
            found = f"{row.actual_columns} column{'s' * (row.actual_columns != 1)}, expected {self._width}"
            bad.append(InvalidRow(row.number - 1, Reason.COLUMNS, found))
            return "skip"

        if not block:
            return {name: pa.array([], pa.string()) for name in self._wanted}, bad
        if block.startswith(BYTE_ORDER_MARK):  # not that of the file, and pyarrow would drop it
            block = BYTE_ORDER_MARK + block
        options = pacsv.ParseOptions(
            delimiter=self._layout.data.delimiter,
            quote_char='"' if self._layout.quotes else False,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        )
        table = pacsv.read_csv(pa.BufferReader(block), self._read, options, self._convert)
        return {name: table[key].combine_chunks() for name, key in self._wanted.items()}, bad

    def _fault(self, line: bytes) -> str:
        """What makes ``line`` impossible to split into fields; empty where nothing does."""
        if not is_utf8(line):
            return "not UTF-8 text"
        if b"\r" in line:
            return "a carriage return within the line"
        if self._layout.quotes and b'"' in line:
            try:
                next(self._split_strictly(line))
            except csv.Error:
                return OPEN_QUOTE
        return ""

    def _is_record(self, lines: bytes) -> bool:
        """Whether some lines, with the breaks between them, are one row."""
        try:
            return [len(fields) for fields in self._split_strictly(lines)] == [self._width]
        except (csv.Error, UnicodeDecodeError):
            return False

    def _split_strictly(self, lines: bytes) -> Iterator[list[str]]:
        return csv.reader([lines.decode()], delimiter=self._layout.data.delimiter, strict=True)


def column_names(path: StoragePath, head: bytes, layout: Layout) -> tuple[Sequence[str], int]:
    """The names of the file's columns by position, and how many lines the header takes with it."""
    refuse_binary(path, head)
    text = head.decode("utf-8-sig", errors="replace")
    lines = enumerate(text.split("\n")[:PEEK_LINES], start=1)
    peeked = [(number, _split(line.strip("\r"), layout)) for number, line in lines if line.strip()]
    if not layout.data.columns:
        if not peeked:
            raise DataError(f"{path}: the file is empty, expected a header line; check data.path")
        number, fields = peeked[0]
        if any("\r" in field for field in fields):
            raise DataError(
                f"{path}:{number}: a carriage return within the header; lines must end in a line feed"
            )
        return [field.strip() for field in fields], number
    if not layout.with_labels:
        rest = layout.columns_without_targets
        widths = [len(fields) for _, fields in peeked]
        if widths.count(len(rest)) > widths.count(len(layout.data.columns)):
            return rest, 0
    return layout.data.columns, 0


def _split(line: str, layout: Layout) -> list[str]:
    if not layout.quotes:
        return line.split(layout.data.delimiter)
    try:
        return next(csv.reader([line], delimiter=layout.data.delimiter), [])
    except csv.Error:  # a field beyond the csv module's limit: no header and no row
        return [line]
