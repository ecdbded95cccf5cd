"""Lines of text files, plain or gzip, in blocks of bounded size, whatever a file holds."""

import gzip
import io
import os
import select
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from hybrid.data.values.invalid_rows import InvalidRow, Reason
from hybrid.errors import DataError, StorageError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath

BLOCK_BYTES = 16 << 20
MAX_LINE_BYTES = 16 << 20
_LOOK_BYTES = 1024  # to recognize gzip, and to hold the message of a store that refuses
_PACKED_BYTES = 4 << 20  # of gzip, read at a time
# A line takes memory as a row, valid or not: 16 MiB may be as many empty lines.
MAX_BLOCK_LINES = 1 << 18
MAX_RECORD_BYTES = 64 << 10  # within which an open quote of a line may be closed
OPEN_QUOTE = "a quote is not closed"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
_NOT_TEXT = {
    b"PK\x03\x04": "a zip archive; unpack it (plain text and gzip are read)",
    b"BZh": "packed by bzip2; unpack it (plain text and gzip are read)",
    b"\xfd7zXZ": "packed by xz; unpack it (plain text and gzip are read)",
    b"\x28\xb5\x2f\xfd": "packed by zstd; unpack it (plain text and gzip are read)",
    b"7z\xbc\xaf": "a 7z archive; unpack it (plain text and gzip are read)",
    b"PAR1": "a Parquet file; set data.format = parquet",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}
STDIN = Path("standard input")  # its name in messages
_READ_BYTES = 1 << 20


def read_descriptor(descriptor: int, size: int, *, at_once: bool) -> Iterator[bytes]:
    """Yield the bytes of a pipe, a terminal or a file to its end, at most ``size`` at a time.

    Args:
        at_once: whether to yield what has arrived, rather than to wait for more.

    Raises:
        DataError: it cannot be read.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    is_open = True
    while is_open:
        blocks, room = [], size
        while room:
            try:
                block = os.read(descriptor, min(room, _READ_BYTES))
            except OSError as error:
                raise DataError(f"{STDIN}: cannot be read ({error.strerror})") from error
            if not block:  # a terminal gives more when it is read again
                is_open = False
                break
            blocks.append(block)
            room -= len(block)
            if at_once and not poll.poll(0):
                break
        if blocks:
            yield b"".join(blocks)


class Lines:
    """The lines of a block, and which of them are kept as rows.

    Args:
        block: complete lines, each with a line feed.
        first_line: number of the first line in the file.
        skip: number of header lines at the start.
    """

    def __init__(self, block: bytes, first_line: int, skip: int) -> None:
        self._block = block
        self._bytes = np.frombuffer(self._block, np.uint8)
        self._ends = np.flatnonzero(self._bytes == ord("\n"))
        self._starts = np.concatenate([[0], self._ends[:-1] + 1])
        self._first_line = first_line
        self.keep = np.arange(len(self._ends)) >= skip

    def __getitem__(self, i: int) -> bytes:
        return self._block[self._starts[i] : self._ends[i]]

    def kept(self) -> bytes:
        """Return the kept lines, one after the other."""
        if self.keep.all():
            return self._block
        return b"".join(self[i] + b"\n" for i in np.flatnonzero(self.keep).tolist())

    @property
    def count(self) -> int:
        """The number of lines, kept or not."""
        return len(self._ends)

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the number in the file of each kept line."""
        return self._first_line + np.flatnonzero(self.keep)

    def drop_blank(self, num_columns: int, delimiter: str) -> None:
        """Drop blank lines, if rows have ``num_columns``."""
        lengths = self._ends - self._starts
        self.keep &= lengths > 0
        # A row of n columns has at least n - 1 delimiters, and a longer blank line starts with a blank that
        # is no delimiter. No other line is examined.
        suspect = lengths < max(num_columns - 1, 1)
        for blank in {" ", "\t"} - {delimiter}:
            suspect |= self._bytes[self._starts] == ord(blank)
        for i in np.flatnonzero(suspect & self.keep).tolist():
            self.keep[i] = bool(self[i].strip())

    def drop_invalid(
        self, fault: Callable[[bytes], str], is_record: Callable[[bytes], bool]
    ) -> list[InvalidRow]:
        """Drop the lines with a ``fault``; return them as invalid rows.

        Args:
            is_record: whether some lines together are one row. If an open quote joins a line to those after
                it, all of them are dropped as one invalid row.
        """
        invalid = []
        last = -1
        for i in np.flatnonzero(self.keep).tolist():
            if i <= last or not (found := fault(self[i])):
                continue
            last, last_line = i, 0
            if found == OPEN_QUOTE and (end := self.record_end(i, is_record)) is not None:
                last, last_line = end, self._first_line + end
                found = "a line break within quotes"
            self.keep[i : last + 1] = False
            invalid.append(InvalidRow(self._first_line + i, Reason.TEXT, found, last_line))
        return invalid

    def record_end(self, i: int, is_record: Callable[[bytes], bool]) -> int | None:
        """Return the line that closes the open quote of line ``i``, if the lines up to it are one row."""
        start, at = int(self._starts[i]), int(self._ends[i])
        while (at := self._block.find(b'"', at, start + MAX_RECORD_BYTES)) >= 0:
            end = int(np.searchsorted(self._ends, at))
            at = int(self._ends[end])
            if self._block.count(b'"', start, at) % 2 == 0:
                return end if is_record(self._block[start:at]) else None
        return None

    def open_tail(self, fault: Callable[[bytes], str], is_record: Callable[[bytes], bool]) -> int | None:
        """Return the start of the first line whose open quote a later block may close."""
        i = int(np.searchsorted(self._starts, len(self._block) - MAX_RECORD_BYTES))
        while i < len(self._ends):
            if b'"' in self[i] and fault(self[i]) == OPEN_QUOTE:
                end = self.record_end(i, is_record)
                if end is None:
                    return int(self._starts[i])
                i = end
            i += 1
        return None

    def last(self) -> bytes:
        """Return the last kept line, or nothing."""
        kept = np.flatnonzero(self.keep)
        return self[int(kept[-1])] if len(kept) else b""

    def is_plain(self) -> bool:
        """Return whether every line is UTF-8 text without a carriage return."""
        return b"\r" not in self._block and (self._block.isascii() or is_utf8(self._block))


def is_utf8(block: bytes) -> bool:
    """Return whether ``block`` is UTF-8 text."""
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def whole_lines(path: StoragePath, chunks: Iterator[bytes], *, is_start: bool = True) -> Iterator[bytes]:
    """Yield the text of ``chunks`` in blocks of complete lines, each line with a line feed only.

    Args:
        path: of the text, for messages.
        chunks: its bytes, cut anywhere; the lines that end within one are yielded before the next is read.
        is_start: whether the file begins with them, so that a byte order mark is removed.

    Raises:
        DataError: a line is longer than 16 MiB.
    """
    rest = b""
    for chunk in chunks:
        chunk = chunk.removeprefix(BYTE_ORDER_MARK) if is_start else chunk
        is_start = False
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield from _pieces(b"".join((rest, memoryview(chunk)[:cut])))
            rest = chunk[cut:]
        else:
            rest += chunk
        if len(rest) > MAX_LINE_BYTES:
            raise DataError(f"{path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; is it a text file?")
    if rest:
        yield from _pieces(rest + b"\n")


def without_returns(block: bytes) -> bytes:
    """Return ``block`` without carriage returns before line feeds."""
    if b"\r" in block:  # a search for one byte takes a fiftieth of the time
        while b"\r\n" in block:
            block = block.replace(b"\r\n", b"\n")
    return block


def _pieces(block: bytes) -> Iterator[bytes]:
    """Yield pieces of at most ``MAX_BLOCK_LINES`` lines, without carriage returns before line feeds."""
    block = without_returns(block)
    is_end = np.frombuffer(block, np.uint8) == ord("\n")
    if np.count_nonzero(is_end) <= MAX_BLOCK_LINES:
        yield block
        return
    ends = np.flatnonzero(is_end) + 1
    for first, last in pairwise([0, *ends[MAX_BLOCK_LINES - 1 :: MAX_BLOCK_LINES].tolist(), len(block)]):
        if first < last:
            yield block[first:last]


def refuse_binary(path: StoragePath, head: bytes) -> None:
    """Raise DataError if ``head``, the start of ``path``, is not that of a text file."""
    kind = next((kind for magic, kind in _NOT_TEXT.items() if head.startswith(magic)), None)
    if kind is None and head[257:262] == b"ustar":
        kind = "a tar archive; unpack it (plain text and gzip are read)"
    if kind is None and b"\0" in head:
        kind = "binary; check the file and data.format"
    if kind is not None:
        raise DataError(f"{path}: is not text but {kind}")


@contextmanager
def open_text(path: StoragePath) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Open a file, decompressed if it is gzip; errors are DataErrors, those of a store StorageErrors.

    Of a file in a store, only what is read is requested.
    """
    try:
        with storage.open_reader(path, ahead=0) as file:
            packed = file.read(_LOOK_BYTES).startswith(GZIP_MAGIC)
            file.seek(0)
            if packed:
                ahead = io.BufferedReader(cast(io.RawIOBase, file), _PACKED_BYTES)
                with gzip.GzipFile(fileobj=ahead) as unpacked:
                    yield unpacked
            else:
                yield file
    except StorageError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); check the file and data.path") from error
