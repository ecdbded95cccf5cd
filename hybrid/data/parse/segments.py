"""Input files in parts that are read apart: stretches of plain text, gzip files whole, row groups of Parquet.

How a file is cut depends on the file alone. Its rows come in the same blocks as if it were read at one go, so
that what is summed up block by block has the same bits.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import TableBlock, read_span, record_start
from hybrid.data.parse.parquet_blocks import opened, read_parquet
from hybrid.data.parse.text_lines import BLOCK_BYTES, GZIP_MAGIC, reading
from hybrid.errors import HybridError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import Place

_Cuts: TypeAlias = list[tuple[int, int]]

PART_BLOCKS = 4
PART_ROWS = 1 << 18  # of Parquet: as many row groups as hold so many rows


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an input file.

    Attributes:
        path: of the file.
        file: its number among all.
        format: "text", "whole" (text that may be packed), or "parquet".
        start, stop: its bytes, or its row groups.
        nominal: the multiple of a block's size that ``start`` is at, or a little before; of Parquet, rows.
        size: bytes of the file that it takes, about.
        is_first, is_last: whether the file begins with it, and ends with it.
    """

    path: Place
    file: int
    format: str
    start: int
    stop: int
    nominal: int
    size: int
    is_first: bool
    is_last: bool


def parts_of(files: Sequence[Place], layout: Layout, block_bytes: int = BLOCK_BYTES) -> list[Part]:
    """The parts of some files, in the order of their rows; who reads a file tells what is wrong with it."""
    found = storage.of_each(
        lambda each: [*_parts_of_file(each[1], each[0], layout, block_bytes)], enumerate(files)
    )
    return [*chain.from_iterable(found)]


def _parts_of_file(path: Place, number: int, layout: Layout, block_bytes: int) -> Iterator[Part]:
    try:
        size = storage.size(path)
        if layout.data.format == "parquet":
            kind, cuts = "parquet", _group_cuts(path)
        else:
            kind, cuts = _text_cuts(path, size, layout, block_bytes)
    except (OSError, pa.ArrowException, HybridError):
        # Whoever reads it says so, after what is wrong with the parts before.
        kind, size, cuts = "parquet" if layout.data.format == "parquet" else "whole", 0, [(0, 0), (0, 0)]
    last = len(cuts) - 2
    share = max(1, cuts[-1][0] - cuts[0][0])
    for i in range(last + 1):
        (start, nominal), (stop, _) = cuts[i], cuts[i + 1]
        part_size = size * (stop - start) // share
        yield Part(path, number, kind, start, stop, nominal, part_size, i == 0, i == last)


def _text_cuts(path: Place, size: int, layout: Layout, block_bytes: int) -> tuple[str, _Cuts]:
    """Whether a file is "text" or read "whole", and where its parts begin, with their nominal beginnings."""
    with storage.reading(path, ahead=0) as file:
        if file.read(2) == GZIP_MAGIC:
            return "whole", [(0, 0), (size, size)]
    cuts = [(0, 0)]
    nominals = range(PART_BLOCKS * block_bytes, size, PART_BLOCKS * block_bytes)
    starts = storage.of_each(lambda nominal: record_start(path, nominal, layout), nominals)
    for start, nominal in zip(starts, nominals, strict=True):
        if start > cuts[-1][0]:
            cuts.append((start, nominal))
    return "text", [*cuts, (size, size)]


def _group_cuts(path: Place) -> _Cuts:
    """The row groups that parts of a Parquet file begin with, the rows of each, and how many there are."""
    with opened(path) as source:
        metadata = pq.read_metadata(source)
    cuts, rows = [(0, 0)], 0
    for group in range(metadata.num_row_groups):
        if rows >= PART_ROWS:
            cuts.append((group, 0))
            rows = 0
        rows += metadata.row_group(group).num_rows
        cuts[-1] = cuts[-1][0], rows
    return [*cuts, (metadata.num_row_groups, 0)]


def read_part(
    part: Part, layout: Layout, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[TableBlock, float]]:
    """The wanted columns of a part, in blocks, each with the share of the part that is read by then.

    Lines are numbered from 1 in each part.

    Raises:
        ConfigError: the file lacks a column.
        DataError: the file cannot be read.
    """
    if part.format == "parquet":
        rows = 0
        for table in read_parquet(part.path, layout, range(part.start, part.stop)):
            rows += table.num_rows
            yield table, min(1.0, rows / max(1, part.nominal))
        return
    chunks = _Chunks(part, block_bytes)
    for table in read_span(part.path, iter(chunks), layout, is_first=part.is_first, is_last=part.is_last):
        yield table, chunks.share


class _Chunks:
    """The bytes of a part of a text file, as :func:`hybrid.data.parse.text_lines.line_blocks` reads them.

    Attributes:
        share: of the part, how much is read.
    """

    def __init__(self, part: Part, block_bytes: int) -> None:
        self._part = part
        self._block_bytes = block_bytes
        self.share = 0.0

    def __iter__(self) -> Iterator[bytes]:
        part, size = self._part, max(1, self._part.size)
        with reading(part.path) as file:
            if part.format == "whole":
                packed: Any = file.fileobj if isinstance(file, gzip.GzipFile) else file
                while chunk := file.read(self._block_bytes):
                    self.share = min(1.0, packed.tell() / size)
                    yield chunk
                return
            file.seek(part.start)
            at = part.start
            stop = part.nominal + self._block_bytes
            while at < part.stop:
                chunk = file.read(min(stop, part.stop) - at)
                if not chunk:
                    return
                at += len(chunk)
                stop += self._block_bytes
                self.share = (at - part.start) / size
                yield chunk
