"""Delimited text in blocks of columns, with exact line numbers.

pyarrow parses a block of complete lines in one thread, every field as a string. A row is one line. A quoted
field cannot hold a line break; if one does, its lines are one invalid row. A stray quote invalidates its own
line, and not the lines after it.
"""

import csv
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, pairwise, repeat
from typing import NamedTuple

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


class TableBlock(NamedTuple):
    """Consecutive rows of one file.

    Attributes:
        columns: the required columns by name, n rows each.
        lines: int64 (n,), 1-based line (Parquet: row) in the file.
        rows: int64 (n,), 0-based row in the block; invalid rows count, blank lines and the header do not.
        num_rows: rows of the block, invalid ones included.
        num_lines: lines that it takes in the file.
        invalid: the rows left out.
    """

    columns: dict[str, pa.Array]
    lines: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    num_rows: int
    num_lines: int
    invalid: list[InvalidRow]


def read_text(path: StoragePath, layout: Layout, block_bytes: int = BLOCK_BYTES) -> Iterator[TableBlock]:
    """Yield the required columns of a text file, plain or gzip, as blocks of strings.

    Raises:
        ConfigError: the file lacks a column.
        DataError: the file cannot be read, or a line is longer than 16 MiB.
    """
    with open_text(path) as file:
        chunks = iter(partial(file.read, block_bytes), b"")
        yield from read_span(path, chunks, layout, is_first=True, is_last=True)


def read_span(
    path: StoragePath, chunks: Iterator[bytes], layout: Layout, *, is_first: bool, is_last: bool
) -> Iterator[TableBlock]:
    """Yield the required columns of a segment of a text file; its lines are numbered from 1.

    Args:
        chunks: the bytes of the segment; it begins and ends at a :func:`record_start`, or with the file.
        is_first, is_last: whether the file begins with the segment, and ends with it.

    Raises:
        ConfigError, DataError: as in :func:`read_text`.
    """
    with open_text(path) as file:
        head = file.read(PEEK_BYTES)
    blocks = whole_lines(path, chunks, is_start=is_first)
    yield from _tables(path, head, blocks, layout, is_first=is_first, is_last=is_last)


def record_start(path: StoragePath, at: int, layout: Layout) -> int:
    """Return the start of the first row that is not complete in the bytes before ``at`` of a plain text file.

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
    """Yield the required columns of plain text that arrives in pieces, each row as soon as it is complete.

    Args:
        path: the name of the text in messages.
        chunks: its bytes, cut anywhere.

    Raises:
        ConfigError: it lacks a column.
        DataError: there is no text, or it is not plain.
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
    yield from _tables(path, head, chain([head], blocks), layout)


def _tables(
    path: StoragePath,
    head: bytes,
    blocks: Iterator[bytes],
    layout: Layout,
    *,
    is_first: bool = True,
    is_last: bool = True,
) -> Iterator[TableBlock]:
    """Yield the required columns of the lines of ``blocks``, of a file that begins with ``head``."""
    names, header_lines = column_names(path, head[:PEEK_BYTES], layout)
    layout.require(names, path)
    parser = _Parser(names, layout)
    line = 1
    for block in parser.whole_records(blocks, is_last=is_last):
        lines = Lines(block, line, max(0, header_lines - line + 1) if is_first else 0)
        yield parser.parse(lines)
        line += lines.count


class _Parser:
    """Parses lines into columns."""

    def __init__(self, names: Sequence[str], layout: Layout) -> None:
        self._width = len(names)
        self._layout = layout
        # pyarrow gets positions as names, since a header may hold the same name twice.
        keys = [str(i) for i in range(self._width)]
        self._required = {name: keys[names.index(name)] for name in layout.required}
        self._read = pacsv.ReadOptions(column_names=keys, use_threads=False, block_size=MAX_BLOCK_BYTES)
        self._convert = pacsv.ConvertOptions(
            column_types=dict.fromkeys(keys, pa.string()),
            include_columns=list(dict.fromkeys(self._required.values())),
            strings_can_be_null=False,
            check_utf8=False,
        )

    def whole_records(self, blocks: Iterator[bytes], *, is_last: bool) -> Iterator[bytes]:
        """Yield the same lines, in blocks that do not end within a row.

        Args:
            is_last: whether the file ends with the blocks. Otherwise the last of them ends with a row.
        """
        rest = b""
        pairs = zip(blocks, repeat(b"more")) if is_last else pairwise(chain(blocks, [b""]))
        for block, following in pairs:
            block = rest + block
            cut = self.open_tail(block) if following else None
            rest = b"" if cut is None else block[cut:]
            if whole := block[:cut]:
                yield whole
        if rest:
            yield rest

    def open_tail(self, block: bytes) -> int | None:
        """Return the start of the lines at the end of ``block`` whose row may continue, if there are any."""
        if not self._layout.quotes or b'"' not in block[-MAX_RECORD_BYTES:]:
            return None
        return Lines(block, 1, 0).open_tail(self._fault, self._is_record)

    def parse(self, lines: Lines) -> TableBlock:
        """Return the required columns of the rows of ``lines``."""
        lines.drop_blank(self._width, self._layout.data.delimiter)
        row_of_line = np.cumsum(lines.keep) - 1
        num_rows = int(lines.keep.sum())
        invalid = [] if lines.is_plain() else lines.drop_invalid(self._fault, self._is_record)
        columns, uneven = self._columns(lines.kept())
        # An open quote swallows the lines after it; in the last line it would not be detected.
        num_read = len(next(iter(columns.values()))) + len(uneven)
        if num_read != lines.keep.sum() or self._fault(lines.last()):
            invalid += lines.drop_invalid(self._fault, self._is_record)
            columns, uneven = self._columns(lines.kept())
        positions = [row.line for row in uneven]
        numbers = lines.numbers()
        invalid += [row._replace(line=int(numbers[row.line])) for row in uneven]
        rows = np.delete(row_of_line[lines.keep], positions)
        return TableBlock(columns, np.delete(numbers, positions), rows, num_rows, lines.count, invalid)

    def _columns(self, block: bytes) -> tuple[dict[str, pa.Array], list[InvalidRow]]:
        """Return the required columns, and the rows (from 0 in ``block``) of another number of columns."""
        uneven: list[InvalidRow] = []

        def skip(row: pacsv.InvalidRow) -> str:
            found = f"{row.actual_columns} column{'s' * (row.actual_columns != 1)}, expected {self._width}"
            uneven.append(InvalidRow(row.number - 1, Reason.COLUMNS, found))
            return "skip"

        if not block:
            return {name: pa.array([], pa.string()) for name in self._required}, uneven
        if block.startswith(BYTE_ORDER_MARK):  # not that of the file; pyarrow would drop it
            block = BYTE_ORDER_MARK + block
        options = pacsv.ParseOptions(
            delimiter=self._layout.data.delimiter,
            quote_char='"' if self._layout.quotes else False,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        )
        table = pacsv.read_csv(pa.BufferReader(block), self._read, options, self._convert)
        return {name: table[key].combine_chunks() for name, key in self._required.items()}, uneven

    def _fault(self, line: bytes) -> str:
        """Return why ``line`` cannot be split into fields; empty if it can."""
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
        """Return whether some lines, with the breaks between them, are one row."""
        try:
            return [len(fields) for fields in self._split_strictly(lines)] == [self._width]
        except (csv.Error, UnicodeDecodeError):
            return False

    def _split_strictly(self, lines: bytes) -> Iterator[list[str]]:
        return csv.reader([lines.decode()], delimiter=self._layout.data.delimiter, strict=True)


def column_names(path: StoragePath, head: bytes, layout: Layout) -> tuple[Sequence[str], int]:
    """Return the names of the columns by position, and the number of lines up to the header."""
    refuse_binary(path, head)
    text = head.decode("utf-8-sig", errors="replace")
    peeked = []
    for number, line in enumerate(text.split("\n")[:PEEK_LINES], start=1):
        if not line.strip():
            continue
        line = line.strip("\r")
        fields = line.split(layout.data.delimiter)
        if layout.quotes:
            try:
                fields = next(csv.reader([line], delimiter=layout.data.delimiter), [])
            except csv.Error:  # a field beyond the limit of the csv module is no header and no row
                fields = [line]
        peeked.append((number, fields))
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
        features = {source for column in (*layout.dense, *layout.sparse) for source in column.sources}
        targets = {name for _, name in layout.targets.columns() if name not in features}
        rest = tuple(name for name in layout.data.columns if name not in targets)
        widths = [len(fields) for _, fields in peeked]
        if widths.count(len(rest)) > widths.count(len(layout.data.columns)):
            return rest, 0
    return layout.data.columns, 0
