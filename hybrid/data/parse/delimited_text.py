"""Delimited text, plain or compressed, in blocks of columns with exact line numbers.

pyarrow parses a block of complete lines in one thread, every field as a string. A row is one line. If a
quoted field has line breaks, its lines are one invalid row. Any other open quote invalidates only its line.
"""

import csv
import gzip
import io
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from hybrid.data.parse.column_layout import Layout, TableBlock
from hybrid.data.parse.input_files import convert_read_errors
from hybrid.data.values.invalid_rows import InvalidRow, Reason
from hybrid.errors import DataError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath

STDIN = Path("standard input")  # the name in messages
BLOCK_BYTES = 16 << 20
PEEK_BYTES, PEEK_LINES = 1 << 20, 100
MAX_LINE_BYTES = 16 << 20
MAX_RECORD_BYTES = 64 << 10  # maximum number of bytes from an open quote to its end
# Every line takes memory, even if it is invalid or blank, and 16 MiB may hold 16 million empty lines.
_MAX_BLOCK_LINES = 1 << 18
_MAX_BLOCK_BYTES = 1 << 30
_LOOK_BYTES = 1024  # enough to recognize compressed text, and for the error message of a store
_PACKED_BYTES = 4 << 20  # compressed bytes of one read
_READ_BYTES = 1 << 20  # bytes of one read of a file descriptor
_OPEN_QUOTE = "a quote is not closed"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The first bytes of compressed files, and the functions that open the files.
_UNPACKERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": partial(pa.CompressedInputStream, compression="bz2"),
    b"\x28\xb5\x2f\xfd": partial(pa.CompressedInputStream, compression="zstd"),
}
PACKED = (gzip.GzipFile, pa.NativeFile)  # the types of compressed files that open_text yields
# The first bytes of zip, xz, 7z and Parquet files and UTF-16 text.
_NOT_TEXT = (b"PK\x03\x04", b"\xfd7zXZ", b"7z\xbc\xaf", b"PAR1", b"\xff\xfe")


def read_lines(
    path: StoragePath, layout: Layout, start: int, stop: int | None, block_bytes: int
) -> Iterator[TableBlock]:
    """Yield the rows of a segment of a text file, in blocks; line 1 is the first line of the segment.

    Args:
        start, stop: results of :func:`find_record_start`, or 0 and None for the start and end of the file.
        block_bytes: number of bytes to read at once, which limits the size of a block.

    For errors, see :func:`hybrid.data.parse.sources.read_segment`.
    """
    with open_text(path) as file:
        head = file.read(PEEK_BYTES)
    chunks = _read_range(path, start, stop, block_bytes)
    yield from _parse_blocks(path, head, _cut_to_lines(path, chunks, not start, layout), layout, not start)


def _read_range(path: StoragePath, start: int, stop: int | None, size: int) -> Iterator[bytes]:
    rest = sys.maxsize if stop is None else stop - start
    with open_text(path) as file:
        if start:
            file.seek(start)
        while chunk := file.read(min(size, rest)):
            rest -= len(chunk)
            yield chunk


def read_stream(path: StoragePath, chunks: Iterator[bytes], layout: Layout) -> Iterator[TableBlock]:
    """Yield the rows of text that arrives in chunks. Complete rows do not wait for the next chunk.

    Messages name ``path``. Raise ConfigError if a required column is missing. Raise DataError if the text is
    blank or no plain text, or has a line of more than 16 MiB, an unusable header or a required column twice.
    """
    blocks = _cut_to_lines(path, chunks, True, layout)
    head = b""
    for block in blocks:
        head += block
        if head.strip() or len(head) > PEEK_BYTES:
            break
    if head.startswith((*_UNPACKERS,)):
        raise DataError(f"{path}: is compressed; decompress it, for example with zcat")
    if not head.strip():
        raise DataError(f"{path}: no rows")
    yield from _parse_blocks(path, head[:PEEK_BYTES], chain([head], blocks), layout, True)


def parse_lines(text: bytes, layout: Layout) -> TableBlock:
    """Return the rows of ``text``: lines without a header, whose fields are ``data.columns`` in this order.

    Every line must end with a line feed. A line is one row, even with an open quote; blank lines are skipped.
    """
    parser = _Parser(layout.data.columns, layout, joins_lines=False)
    return parser.parse(_Lines(_normalize(text, layout), 1, 0))


def find_record_start(path: StoragePath, at: int, layout: Layout) -> int:
    """Return the position of the first row that is not complete in the first ``at`` bytes of a plain text.

    If a line has more than 16 MiB before ``at``, return ``at``; the error is raised when the line is parsed.
    For other errors, see :func:`read_header`. If a read fails, raise DataError or StorageError.
    """
    with open_text(path) as file:
        names, _ = read_header(path, file.read(PEEK_BYTES), layout)
        for size in (2 * MAX_RECORD_BYTES, MAX_LINE_BYTES + 2 * MAX_RECORD_BYTES):
            start = max(0, at - size)
            file.seek(start)
            window = file.read(at - start)
            end = window.rfind(b"\n") + 1
            if not start or end > size - MAX_RECORD_BYTES // 2:
                break
    if start and not end:
        return at
    text = _normalize(window[:end], layout)
    num_lines = text.count(b"\n", 0, _Parser(names, layout).count_complete(text))
    ends = np.flatnonzero(np.frombuffer(window, np.uint8) == ord("\n"))
    return start + (int(ends[num_lines - 1]) + 1 if num_lines else 0)


def _parse_blocks(
    path: StoragePath, head: bytes, blocks: Iterator[bytes], layout: Layout, is_start: bool
) -> Iterator[TableBlock]:
    """Parse blocks of lines; ``head`` is the start of the file, and ``is_start`` whether they begin there."""
    names, header_lines = read_header(path, head, layout)
    parser = _Parser(names, layout)
    line = 1
    for block in parser.regroup(blocks):
        lines = _Lines(block, line, max(0, header_lines - line + 1) if is_start else 0)
        yield parser.parse(lines)
        line += lines.count


class _Lines:
    """The lines of a block. ``keep`` is true for rows, and false for the first ``skip`` lines, the header."""

    def __init__(self, block: bytes, first_line: int, skip: int) -> None:
        self.block = block
        self.bytes = np.frombuffer(block, np.uint8)
        self.ends = np.flatnonzero(self.bytes == ord("\n"))
        self.starts = np.concatenate([[0], self.ends[:-1] + 1])
        self.count = len(self.ends)
        self.first_line = first_line
        self.keep = np.arange(self.count) >= skip

    def __getitem__(self, i: int) -> bytes:
        return self.block[self.starts[i] : self.ends[i]]

    def join_kept(self) -> bytes:
        if self.keep.all():
            return self.block
        return b"".join(self[i] + b"\n" for i in np.flatnonzero(self.keep).tolist())


class _Parser:
    def __init__(self, names: Sequence[str], layout: Layout, *, joins_lines: bool = True) -> None:
        self._width = len(names)
        self._joins_lines = joins_lines  # whether an open quote can join lines, which are one invalid row
        self._quotes = layout.quotes
        self._long_delimiter, self._delimiter = layout.data.delimiter, layout.delimiter
        # Positions serve as names for pyarrow, since a header may hold the same name twice.
        keys = [str(i) for i in range(self._width)]
        # The path of the file has the other required columns. One column is always read, to count rows.
        found = [name for name in layout.required if name in names] or names[:1]
        self._required = {name: keys[names.index(name)] for name in found}
        self._read = pacsv.ReadOptions(column_names=keys, use_threads=False, block_size=_MAX_BLOCK_BYTES)
        self._convert = pacsv.ConvertOptions(
            column_types=dict.fromkeys(keys, pa.string()),
            include_columns=list(dict.fromkeys(self._required.values())),
            strings_can_be_null=False,
            check_utf8=False,
        )

    def regroup(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Regroup ``blocks``, so that no block ends within a row."""
        rest = b""
        for block in blocks:
            block = rest + block
            cut = self.count_complete(block)
            rest = block[cut:]
            if cut:
                yield block[:cut]
        if rest:
            yield rest

    def count_complete(self, block: bytes) -> int:
        """Return the number of bytes before the first row that may end in a later block."""
        if not self._quotes or b'"' not in block[-MAX_RECORD_BYTES:]:
            return len(block)
        lines = _Lines(block, 1, 0)
        i = int(np.searchsorted(lines.starts, len(block) - MAX_RECORD_BYTES))
        while i < lines.count:
            if b'"' in lines[i] and self._fault(lines[i]) == _OPEN_QUOTE:
                end = self._find_record_end(lines, i)
                if end is None:
                    return int(lines.starts[i])
                i = end
            i += 1
        return len(block)

    def parse(self, lines: _Lines) -> TableBlock:
        self._drop_blank(lines)
        row_of_line = np.cumsum(lines.keep) - 1
        num_rows = int(lines.keep.sum())
        block = lines.block
        is_plain = b"\r" not in block and (block.isascii() or _is_utf8(block))
        invalid = [] if is_plain else self._drop_invalid(lines)
        columns, uneven = self._columns(lines.join_kept())
        # pyarrow joins a line with an open quote to the next lines, so it returns fewer rows. The number of
        # rows does not show an open quote in the last line.
        num_read = len(next(iter(columns.values()))) + len(uneven)
        kept = np.flatnonzero(lines.keep)
        if num_read != len(kept) or (len(kept) and self._fault(lines[int(kept[-1])])):
            invalid += self._drop_invalid(lines)
            columns, uneven = self._columns(lines.join_kept())
            kept = np.flatnonzero(lines.keep)
        numbers = lines.first_line + kept
        positions = [row.line for row in uneven]
        invalid += [row._replace(line=int(numbers[row.line])) for row in uneven]
        rows = np.delete(row_of_line[kept], positions)
        return TableBlock(columns, np.delete(numbers, positions), rows, num_rows, lines.count, invalid)

    def _drop_blank(self, lines: _Lines) -> None:
        lengths = lines.ends - lines.starts
        lines.keep &= lengths > 0
        # A row of n columns has at least n - 1 delimiters. A longer blank line starts with a blank that is no
        # delimiter. So only shorter lines, and lines with such a start, are examined.
        suspect = lengths < max(self._width - 1, 1)
        for blank in {" ", "\t"} - {self._delimiter}:
            suspect |= lines.bytes[lines.starts] == ord(blank)
        for i in np.flatnonzero(suspect & lines.keep).tolist():
            lines.keep[i] = bool(lines[i].strip())

    def _drop_invalid(self, lines: _Lines) -> list[InvalidRow]:
        invalid = []
        last = -1
        for i in np.flatnonzero(lines.keep).tolist():
            fault = self._fault(lines[i]) if i > last else ""
            if not fault:
                continue
            end = self._find_record_end(lines, i) if fault == _OPEN_QUOTE else None
            last, last_line = i, 0
            if end is not None:
                last, last_line = end, lines.first_line + end
                fault = "a line break within quotes"
            lines.keep[i : last + 1] = False
            invalid.append(InvalidRow(lines.first_line + i, Reason.TEXT, fault, last_line))
        return invalid

    def _find_record_end(self, lines: _Lines, i: int) -> int | None:
        """Return the index of the last line of the row with an open quote in line ``i``; None without one."""
        if not self._joins_lines:
            return None
        start, at = int(lines.starts[i]), int(lines.ends[i])
        while (at := lines.block.find(b'"', at, start + MAX_RECORD_BYTES)) >= 0:
            end = int(np.searchsorted(lines.ends, at))
            at = int(lines.ends[end])
            if lines.block.count(b'"', start, at) % 2 == 0:
                try:
                    rows = list(self._split_strictly(lines.block[start:at]))
                except (csv.Error, UnicodeDecodeError):
                    return None
                return end if [len(fields) for fields in rows] == [self._width] else None
        return None

    def _columns(self, block: bytes) -> tuple[dict[str, pa.Array], list[InvalidRow]]:
        """Return the required columns; and the rows with a wrong number of fields, with ``line`` from 0."""
        uneven: list[InvalidRow] = []

        def skip(row: pacsv.InvalidRow) -> str:
            found = f"{row.actual_columns} column{'s' * (row.actual_columns != 1)}, expected {self._width}"
            uneven.append(InvalidRow(row.number - 1, Reason.COLUMNS, found))
            return "skip"

        if not block:
            return {name: pa.array([], pa.string()) for name in self._required}, uneven
        if block.startswith(_BYTE_ORDER_MARK):  # a value starts with the mark, which pyarrow would drop
            block = _BYTE_ORDER_MARK + block
        options = pacsv.ParseOptions(
            delimiter=self._delimiter,
            quote_char='"' if self._quotes else False,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        )
        table = pacsv.read_csv(pa.BufferReader(block), self._read, options, self._convert)
        columns = {name: table[key].combine_chunks() for name, key in self._required.items()}
        if self._delimiter != self._long_delimiter:  # of a quoted field
            columns = {
                name: pc.replace_substring(texts, self._delimiter, self._long_delimiter)
                for name, texts in columns.items()
            }
        return columns, uneven

    def _fault(self, line: bytes) -> str:
        """Return the reason why ``line`` cannot be split into fields; empty if it can."""
        if not _is_utf8(line):
            return "not UTF-8 text"
        if b"\r" in line:
            return "a carriage return within the line"
        if self._quotes and b'"' in line:
            try:
                next(self._split_strictly(line))
            except csv.Error:
                return _OPEN_QUOTE
        return ""

    def _split_strictly(self, lines: bytes) -> Iterator[list[str]]:
        return csv.reader([lines.decode()], delimiter=self._delimiter, strict=True)


def read_header(path: StoragePath, head: bytes, layout: Layout) -> tuple[Sequence[str], int]:
    """Return the column names by position, and the 1-based line of the header, or 0 without a header.

    ``head`` is the first 1 MiB of the file. If ``data.columns`` is empty, the first line with text is the
    header, and a file without text has the columns ``layout.required``. Raise the errors of
    :meth:`Layout.require`, and DataError if the file is no text, or ``head`` has no usable header.
    """
    if head.startswith(_NOT_TEXT) or b"\0" in head:
        rule = "unpack an archive, save text as UTF-8, or correct data.format"
        raise DataError(f"{path}: is not text; {rule}")
    text = _normalize(head, layout).decode("utf-8-sig", errors="replace")
    lines = text.split("\n")
    if len(head) >= PEEK_BYTES:
        lines.pop()  # it may be incomplete
    filled = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    peeked = []
    for number, line in islice(filled, PEEK_LINES):
        line = line.strip("\r")
        fields = line.split(layout.delimiter)
        if layout.quotes:
            try:
                fields = next(csv.reader([line], delimiter=layout.delimiter), [])
            except csv.Error:  # a field is longer than the csv module allows, so this is no header and no row
                fields = [line]
        peeked.append((number, fields))
    names, header_lines = layout.data.columns, 0
    if not names:
        if not peeked and len(head) < PEEK_BYTES:
            return layout.required, 0  # an empty file, as Spark writes them beside others
        if not peeked:
            found = f"has no header line in its first {PEEK_BYTES >> 20} MiB"
            raise DataError(f"{path}: {found}; check data.path")
        header_lines, fields = peeked[0]
        if any("\r" in field for field in fields):
            raise DataError(
                f"{path}:{header_lines}: a carriage return within the header; lines must end in a line feed"
            )
        names = tuple(field.strip() for field in fields)
    elif not layout.with_labels:
        features = {source for column in (*layout.dense, *layout.sparse) for source in column.sources}
        targets = {name for _, name in layout.targets.columns() if name not in features}
        rest = tuple(name for name in names if name not in targets)
        widths = [len(fields) for _, fields in peeked]
        if widths.count(len(rest)) > widths.count(len(names)):
            names = rest
    layout.require(names, path)
    return names, header_lines


def _is_utf8(block: bytes) -> bool:
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cut_to_lines(
    path: StoragePath, chunks: Iterator[bytes], is_start: bool, layout: Layout
) -> Iterator[bytes]:
    """Join ``chunks``, of at most 16 MiB each, to blocks of complete lines, changed by :func:`_normalize`.

    Lines that end in a chunk are yielded before the next chunk is read. If ``is_start``, a byte order mark is
    removed. Raise DataError if a line is longer than 16 MiB.
    """
    rest = b""
    for chunk in chunks:
        chunk = chunk.removeprefix(_BYTE_ORDER_MARK) if is_start else chunk
        is_start = False
        cut = chunk.rfind(b"\n") + 1
        if len(rest) + (chunk.find(b"\n") if cut else len(chunk)) > MAX_LINE_BYTES:
            raise DataError(f"{path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; is it a text file?")
        if cut:
            yield from _limit_lines(_normalize(b"".join((rest, memoryview(chunk)[:cut])), layout))
            rest = chunk[cut:]
        else:
            rest += chunk
    if rest:
        yield from _limit_lines(_normalize(rest + b"\n", layout))


def _normalize(block: bytes, layout: Layout) -> bytes:
    """Remove carriage returns before line feeds; replace delimiters of several characters by one."""
    if layout.delimiter != layout.data.delimiter:
        block = block.replace(layout.data.delimiter.encode(), layout.delimiter.encode())
    if b"\r" in block:  # a search for one byte takes a fiftieth of the time
        while b"\r\n" in block:
            block = block.replace(b"\r\n", b"\n")
    return block


def _limit_lines(block: bytes) -> Iterator[bytes]:
    is_end = np.frombuffer(block, np.uint8) == ord("\n")
    if np.count_nonzero(is_end) <= _MAX_BLOCK_LINES:
        yield block
        return
    ends = np.flatnonzero(is_end) + 1
    for first, last in pairwise([0, *ends[_MAX_BLOCK_LINES - 1 :: _MAX_BLOCK_LINES].tolist(), len(block)]):
        if first < last:
            yield block[first:last]


@contextmanager
def open_text(path: StoragePath) -> Iterator[IO[bytes]]:
    """Yield an open text file, decompressed if necessary; callers may seek only in plain text.

    A read of plain text from a store requests only the bytes that it returns; compressed text is requested in
    blocks of 4 MiB. Failed reads raise DataError or StorageError.
    """
    with convert_read_errors(path), storage.open_reader(path, follows_links=True) as file:
        start = file.read(_LOOK_BYTES)
        file.seek(0)
        unpack = next((each for magic, each in _UNPACKERS.items() if start.startswith(magic)), None)
        if unpack is None:
            yield file
            return
        with unpack(io.BufferedReader(cast(io.RawIOBase, file), _PACKED_BYTES)) as unpacked:
            yield unpacked


def read_descriptor(descriptor: int, size: int, *, at_once: bool) -> Iterator[bytes]:
    """Yield all bytes of a pipe, terminal or file, at most ``size`` at a time; DataError if a read fails.

    Args:
        at_once: whether to yield bytes as soon as they arrive; otherwise wait for ``size`` bytes or the end.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    chunk, block = bytearray(), b"more"
    while block:
        try:
            block = os.read(descriptor, min(size - len(chunk), _READ_BYTES))
        except OSError as error:
            raise DataError(f"{STDIN}: cannot be read ({error.strerror})") from error
        chunk += block
        is_complete = len(chunk) == size or not block or (at_once and not poll.poll(0))
        if chunk and is_complete:
            yield bytes(chunk)
            chunk.clear()
