"""Delimited text, plain or compressed, in blocks of columns with exact line numbers.

pyarrow parses a block of complete lines in one thread, every field as a string. A valid row is one line. A
row with a line break within quotes is invalid. A quote that is never closed invalidates only one line.
"""

import csv
import gzip
import io
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any, Literal, cast

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
    """Yield the rows of a segment of a text file in blocks. Lines are numbered from 1 in each segment.

    Args:
        start, stop: results of :func:`find_record_start`, or 0 and None for the start and end of the file.
        block_bytes: number of bytes to read at once.

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

    ``path`` is a name for messages. Raise ConfigError if a required column is missing. Raise DataError if the
    text is compressed or binary, or has a line of over 16 MiB, no usable header or a required column twice.
    """
    blocks = _cut_to_lines(path, chunks, True, layout)
    head = b""
    for block in blocks:
        head += block
        if head.strip() or len(head) > PEEK_BYTES:
            break
    if head.startswith((*_UNPACKERS,)):
        raise DataError(f"{path}: is compressed; decompress it, for example with zcat")
    yield from _parse_blocks(path, head[:PEEK_BYTES], chain([head], blocks), layout, True)


def parse_lines(text: bytes, layout: Layout) -> TableBlock:
    """Return the rows of a text without a header. The fields of a line are ``data.columns`` in this order.

    Every line must end with a line feed. Quotes do not join lines: a line with an open quote is an invalid
    row. Blank lines are skipped.
    """
    return _Lines(_normalize(text, layout), layout.data.columns, layout, joins_lines=False).parse(1)


def find_record_start(path: StoragePath, at: int, layout: Layout) -> int:
    """Return the start of a row of a plain text file, as a byte position at or shortly before ``at``.

    If the line at ``at`` is too long, return ``at``. The reader of the line then raises the error. Raise the
    errors of :func:`read_header`, and DataError or StorageError if a read fails.
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
    num_lines = text.count(b"\n", 0, _count_complete(text, names, layout))
    return start + sum(len(line) + 1 for line in window.split(b"\n")[:num_lines])


def _parse_blocks(
    path: StoragePath, head: bytes, blocks: Iterator[bytes], layout: Layout, is_start: bool
) -> Iterator[TableBlock]:
    """Parse blocks of lines. The header is in ``head``, and if ``is_start``, also in ``blocks``."""
    names, header_lines = read_header(path, head, layout)
    line, rest = 1, b""
    for block in chain(blocks, [b""]):  # an empty block marks the end
        text = rest + block
        size = _count_complete(text, names, layout) if block else len(text)
        rest = text[size:]
        if size:
            lines = _Lines(text[:size], names, layout)
            if is_start:
                lines.keep[: max(0, header_lines - line + 1)] = False
            yield lines.parse(line)
            line += len(lines.keep)


def _count_complete(text: bytes, names: Sequence[str], layout: Layout) -> int:
    """Return the size of ``text`` in bytes, without a row at its end whose open quote may be closed later."""
    if b'"' in text[-MAX_RECORD_BYTES:]:
        lines = _Lines(text, names, layout)
        first = int(np.searchsorted(lines.starts, len(text) - MAX_RECORD_BYTES))
        for row in lines.find_faults(range(first, len(lines.keep))):
            if row.found == _OPEN_QUOTE:
                return int(lines.starts[row.line])
    return len(text)


class _Lines:
    """The parser of a block of lines. Methods number lines from 0.

    Args:
        names: the column names by position; a name may occur twice.
        joins_lines: whether an open quote makes the next lines a part of the same (invalid) row.

    Attributes:
        keep: a mask of the lines to return as rows. ``parse`` excludes blank lines and invalid rows.
    """

    def __init__(
        self, text: bytes, names: Sequence[str], layout: Layout, *, joins_lines: bool = True
    ) -> None:
        self._text, self._names, self._layout, self._joins_lines = text, names, layout, joins_lines
        self._bytes = np.frombuffer(text, np.uint8)
        self._ends = np.flatnonzero(self._bytes == ord("\n"))
        self.starts = np.concatenate([[0], self._ends[:-1] + 1])
        self.keep = np.ones(len(self._ends), np.bool_)

    def _line(self, i: int) -> bytes:
        return self._text[self.starts[i] : self._ends[i]]

    def parse(self, first_line: int) -> TableBlock:
        """Return the rows of the block, whose first line is line ``first_line`` of the segment."""
        lengths, first = self._ends - self.starts, self._bytes[self.starts]
        self.keep &= lengths > 0
        # A row of n columns has at least n - 1 delimiters. A longer blank line starts with a blank that is no
        # delimiter. So only shorter lines, and lines with such a start, are examined.
        suspect = np.isin(first, [ord(" "), ord("\t")]) & (first != ord(self._layout.delimiter))
        suspect |= lengths < len(self._names) - 1
        for i in np.flatnonzero(suspect & self.keep).tolist():
            self.keep[i] = bool(self._line(i).strip())
        is_row = self.keep.copy()
        invalid: list[InvalidRow] = []
        columns = None
        with suppress(UnicodeDecodeError):  # some lines are then not UTF-8 text
            if "\r" not in self._text.decode():
                columns = self._columns(invalid)
        if columns is None:
            invalid = [*self.find_faults(np.flatnonzero(is_row).tolist())]
            for row in invalid:
                self.keep[row.line : max(row.line, row.last) + 1] = False
            columns = self._columns(invalid)
            assert columns is not None, "no line has an open quote"
        kept = np.flatnonzero(self.keep)
        rows = (np.cumsum(is_row) - 1)[kept]
        invalid = [row.after(first_line) for row in invalid]
        return TableBlock(columns, first_line + kept, rows, int(is_row.sum()), len(is_row), invalid)

    def find_faults(self, indices: Iterable[int]) -> Iterator[InvalidRow]:
        """Of the rows that start in the lines ``indices``, yield those that cannot be split into fields."""
        last = -1
        for i in indices:
            fault = self._fault(i) if i > last else ""
            if fault:
                last = self._find_record_end(i) if fault == _OPEN_QUOTE else i
                is_joined = last > i
                found = "a line break within quotes" if is_joined else fault
                yield InvalidRow(i, Reason.TEXT, found, last if is_joined else 0)

    def _fault(self, i: int) -> str:
        """Return why line ``i`` cannot be split into fields, or an empty text if it can be split."""
        try:
            line = self._line(i).decode()
            if "\r" in line:
                return "a carriage return within the line"
            if self._layout.quotes and '"' in line:
                next(csv.reader([line], delimiter=self._layout.delimiter, strict=True))
        except UnicodeDecodeError:
            return "not UTF-8 text"
        except csv.Error:
            return _OPEN_QUOTE
        return ""

    def _find_record_end(self, i: int) -> int:
        """If a row with a line break within quotes starts in line ``i``, return its last line, else ``i``."""
        stop = np.searchsorted(self.starts, self.starts[i] + MAX_RECORD_BYTES) if self._joins_lines else i
        lines = (self._line(number).decode() + "\n" for number in range(i, stop))
        reader = csv.reader(lines, delimiter=self._layout.delimiter, strict=True)
        try:
            fields = next(reader, [])
        except (csv.Error, UnicodeDecodeError):
            return i
        return i + reader.line_num - 1 if len(fields) == len(self._names) else i

    def _columns(self, invalid: list[InvalidRow]) -> dict[str, pa.Array] | None:
        """Return the required columns of the lines in ``keep``. Return None if a line has an open quote.

        Lines with a wrong number of fields are added to ``invalid``, and removed from ``keep``.
        """
        # Positions serve as names for pyarrow, since a header may hold the same name twice.
        keys = [str(i) for i in range(len(self._names))]
        # The path of the file has the other required columns. One column is always read, to count rows.
        found = [name for name in self._layout.required if name in self._names] or self._names[:1]
        required = {name: keys[self._names.index(name)] for name in found}
        kept = np.flatnonzero(self.keep)
        if not len(kept):
            return {name: pa.array([], pa.string()) for name in required}
        text = self._text
        if len(kept) < len(self.keep):
            text = self._bytes[np.repeat(self.keep, self._ends - self.starts + 1)].tobytes()
        if text.startswith(_BYTE_ORDER_MARK):  # a value starts with the mark, which pyarrow would drop
            text = _BYTE_ORDER_MARK + text
        uneven: list[InvalidRow] = []

        def skip(row: pacsv.InvalidRow) -> str:
            columns = f"{row.actual_columns} column{'s' * (row.actual_columns != 1)}"
            line = int(kept[row.number - 1])
            uneven.append(InvalidRow(line, Reason.COLUMNS, f"{columns}, expected {len(keys)}"))
            return "skip"

        delimiter, given_delimiter = self._layout.delimiter, self._layout.data.delimiter
        quote, types = '"' if self._layout.quotes else False, dict.fromkeys(required.values(), pa.string())
        table = pacsv.read_csv(
            pa.BufferReader(text),
            pacsv.ReadOptions(column_names=keys, use_threads=False, block_size=_MAX_BLOCK_BYTES),
            pacsv.ParseOptions(
                delimiter=delimiter, quote_char=quote, ignore_empty_lines=False, invalid_row_handler=skip
            ),
            pacsv.ConvertOptions(check_utf8=False, column_types=types, include_columns=[*types]),
        )
        # pyarrow joins a line with an open quote to the next lines, so it returns fewer rows. The number of
        # rows does not show an open quote in the last line.
        if len(table) + len(uneven) < len(kept) or self._fault(int(kept[-1])):
            return None
        invalid += uneven
        self.keep[[row.line for row in uneven]] = False
        columns = {name: table[key].combine_chunks() for name, key in required.items()}
        if delimiter == given_delimiter:
            return columns
        # A quoted field may have the delimiter.
        return {
            name: pc.replace_substring(texts, delimiter, given_delimiter) for name, texts in columns.items()
        }


def read_header(path: StoragePath, head: bytes, layout: Layout) -> tuple[Sequence[str], int]:
    """Return the column names by position, and the 1-based line of the header (0 if there is no header).

    ``head`` is the first 1 MiB of the file. If ``data.columns`` is empty, the first line that is not blank is
    the header. For an empty file, return ``layout.required``. Raise the errors of :meth:`Layout.require`.
    Raise DataError if the file is no text, or has no usable header.
    """
    if head.startswith(_NOT_TEXT) or b"\0" in head:
        rule = "unpack an archive, save text as UTF-8, or correct data.format"
        raise DataError(f"{path}: is not text; {rule}")
    lines = _normalize(head, layout).decode("utf-8-sig", errors="replace").split("\n")
    if len(head) >= PEEK_BYTES:
        lines.pop()  # it may be incomplete
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if layout.quotes else csv.QUOTE_NONE
    peeked = []
    filled = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in islice(filled, PEEK_LINES):
        try:
            fields = next(csv.reader([line.strip("\r")], delimiter=layout.delimiter, quoting=quoting))
        except csv.Error:  # a carriage return, or a field that is longer than the csv module allows
            fields = [line]
        peeked.append((number, fields))
    names, header_lines = layout.data.columns, 0
    if not names:
        if not peeked:
            if len(head) < PEEK_BYTES:
                return layout.required, 0  # an empty file, as Spark writes them beside others
            found = f"has no header line in its first {PEEK_BYTES >> 20} MiB"
            raise DataError(f"{path}: {found}; check data.path")
        header_lines, fields = peeked[0]
        if any("\r" in field for field in fields):
            rule = "a carriage return within the header; lines must end in a line feed"
            raise DataError(f"{path}:{header_lines}: {rule}")
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


def _cut_to_lines(
    path: StoragePath, chunks: Iterator[bytes], is_start: bool, layout: Layout
) -> Iterator[bytes]:
    """Yield the text of ``chunks`` in blocks of complete lines, normalized by :func:`_normalize`.

    The lines that end in a chunk are yielded before the next chunk is read. If ``is_start``, a byte order
    mark is removed. Raise DataError if a line is longer than 16 MiB.
    """
    rest = b""
    for chunk in chunks:
        text = rest + (chunk.removeprefix(_BYTE_ORDER_MARK) if is_start else chunk)
        is_start = False
        cut = text.rfind(b"\n") + 1
        if (text.find(b"\n") if cut else len(text)) > MAX_LINE_BYTES:
            raise DataError(f"{path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; is it a text file?")
        yield from _limit_lines(_normalize(text[:cut], layout))
        rest = text[cut:]
    if rest:
        yield from _limit_lines(_normalize(rest + b"\n", layout))


def _normalize(block: bytes, layout: Layout) -> bytes:
    """Remove carriage returns before line feeds. Replace a long delimiter by ``layout.delimiter``."""
    if layout.delimiter != layout.data.delimiter:
        block = block.replace(layout.data.delimiter.encode(), layout.delimiter.encode())
    if b"\r" in block:  # a search for one byte takes a fiftieth of the time
        while b"\r\n" in block:
            block = block.replace(b"\r\n", b"\n")
    return block


def _limit_lines(block: bytes) -> Iterator[bytes]:
    cuts = {0, len(block)}
    if block.count(b"\n") > _MAX_BLOCK_LINES:
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
        cuts.update(ends[_MAX_BLOCK_LINES - 1 :: _MAX_BLOCK_LINES].tolist())
    for first, last in pairwise(sorted(cuts)):
        yield block[first:last]


@contextmanager
def open_text(path: StoragePath) -> Iterator[IO[bytes]]:
    """Open a text file, and decompress it if necessary. Only a file that is not compressed allows seeks.

    If the file is in an object store and not compressed, a read requests only the bytes that it returns.
    Failed reads raise DataError or StorageError.
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
    """Yield the bytes of a pipe, terminal or file, at most ``size`` at a time. Raise DataError on failure.

    Args:
        at_once: whether to yield bytes as soon as they arrive; otherwise wait for ``size`` bytes or the end.
    """
    chunk, block = bytearray(), b"more"
    while block:
        try:
            block = os.read(descriptor, min(size - len(chunk), _READ_BYTES))
        except OSError as error:
            raise DataError(f"{STDIN}: cannot be read ({error.strerror})") from error
        chunk += block
        has_more = not at_once or select.select([descriptor], [], [], 0)[0]
        if chunk and not (block and has_more and len(chunk) < size):
            yield bytes(chunk)
            chunk.clear()
