"""Delimited text in blocks of columns: fast, and exact about line numbers.

A block of whole lines is parsed by pyarrow, one thread, every field a string. A record is one line. A quoted
field cannot hold a line break: where one does, its lines are one bad row. A stray quote spoils its own line
and not those after it.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv

from hybrid.data.bad_rows import BadRow, Reason
from hybrid.data.layout import Layout
from hybrid.data.lines import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    MAX_RECORD_BYTES,
    OPEN_QUOTE,
    Lines,
    is_utf8,
    line_blocks,
    reading,
    refuse_binary,
)
from hybrid.errors import DataError

MAX_BLOCK_BYTES = 1 << 30
PEEK_BYTES = 1 << 20
PEEK_LINES = 100


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
    for block in parser.whole_records(line_blocks(path, block_bytes)):
        num_lines = block.count(b"\n")
        skip = max(0, min(num_lines, header_lines - line + 1))
        yield parser.parse(Lines(block, line, skip))
        line += num_lines


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

    def whole_records(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """The same lines, in blocks none of which ends between lines that belong together."""
        rest = b""
        for block in blocks:
            block = rest + block
            cut = None
            if self._layout.quotes and b'"' in block[-MAX_RECORD_BYTES:]:
                cut = Lines(block, 1, 0).open_tail(self._fault, self._is_record)
            rest = b"" if cut is None else block[cut:]
            if whole := block[:cut]:
                yield whole
        if rest:
            yield rest

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


def _column_names(path: Path, layout: Layout) -> tuple[Sequence[str], int]:
    """The names of the file's columns by position, and how many lines the header takes with it."""
    with reading(path) as file:
        start = file.read(PEEK_BYTES)
    refuse_binary(path, start)
    head = start.decode("utf-8-sig", errors="replace")
    lines = enumerate(head.split("\n")[:PEEK_LINES], start=1)
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
