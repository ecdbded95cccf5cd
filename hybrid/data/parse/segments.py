"""Segments of input files, each read alone: byte ranges of plain text, gzip files, row groups of Parquet.

The cuts depend on the file alone. The blocks of rows are those of a file that is read as one segment, so sums
over blocks have the same bits.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import IO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import TableBlock, read_span, record_start
from hybrid.data.parse.parquet_blocks import open_parquet, read_parquet
from hybrid.data.parse.text_lines import BLOCK_BYTES, GZIP_MAGIC, open_text
from hybrid.errors import HybridError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath

SEGMENT_BLOCKS = 4
SEGMENT_ROWS = 1 << 18  # of Parquet: a segment takes row groups until it has so many rows


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of an input file.

    Attributes:
        path: of the file.
        file: its number among all files.
        format: "text", "whole" (text that may be gzip), or "parquet".
        start, stop: its bytes, or its row groups.
        nominal: of text, the multiple of the block size at ``start`` or just after; of Parquet, its rows.
        size: the bytes of the file that it takes, approximately.
        is_first, is_last: whether the file begins with it, and ends with it.
    """

    path: StoragePath
    file: int
    format: str
    start: int
    stop: int
    nominal: int
    size: int
    is_first: bool
    is_last: bool


def split_files(
    files: Sequence[StoragePath], layout: Layout, block_bytes: int = BLOCK_BYTES
) -> list[Segment]:
    """Return the segments of some files, in the order of their rows; reading them raises what is wrong."""
    segments = storage.map_concurrently(
        lambda each: [*_split_file(each[1], each[0], layout, block_bytes)], enumerate(files)
    )
    return [*chain.from_iterable(segments)]


def _split_file(path: StoragePath, number: int, layout: Layout, block_bytes: int) -> Iterator[Segment]:
    kind = "parquet" if layout.data.format == "parquet" else "text"
    step = SEGMENT_BLOCKS * block_bytes
    # Of each segment, the start and the nominal start (Parquet: the number of rows); then the end.
    cuts = [(0, 0)]
    try:
        size = storage.require_file(path).size
        if kind == "parquet":
            with open_parquet(path) as source:
                metadata = pq.read_metadata(source)
            rows = 0
            for group in range(metadata.num_row_groups):
                if rows >= SEGMENT_ROWS:
                    cuts.append((group, 0))
                    rows = 0
                rows += metadata.row_group(group).num_rows
                cuts[-1] = cuts[-1][0], rows
            cuts.append((metadata.num_row_groups, 0))
        else:
            with storage.open_reader(path, ahead=0) as file:
                if file.read(2) == GZIP_MAGIC:
                    kind = "whole"
            nominals = range(step, size, step) if kind == "text" else ()
            starts = storage.map_concurrently(lambda nominal: record_start(path, nominal, layout), nominals)
            for start, nominal in zip(starts, nominals, strict=True):
                if start > cuts[-1][0]:
                    cuts.append((start, nominal))
            cuts.append((size, size))
    except (OSError, pa.ArrowException, HybridError):
        # Reading the file raises the same error, after the errors of the segments before.
        kind, size, cuts = "parquet" if kind == "parquet" else "whole", 0, [(0, 0), (0, 0)]
    last = len(cuts) - 2
    total = max(1, cuts[-1][0] - cuts[0][0])
    for i in range(last + 1):
        (start, nominal), (stop, _) = cuts[i], cuts[i + 1]
        segment_size = size * (stop - start) // total
        yield Segment(path, number, kind, start, stop, nominal, segment_size, i == 0, i == last)


def read_segment(
    segment: Segment, layout: Layout, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[TableBlock, float]]:
    """Yield the required columns of a segment, in blocks, each with the fraction that is read by then.

    Lines are numbered from 1 in each segment.

    Raises:
        ConfigError: the file lacks a column.
        DataError: the file cannot be read.
    """
    if segment.format == "parquet":
        rows = 0
        for table in read_parquet(segment.path, layout, range(segment.start, segment.stop)):
            rows += table.num_rows
            yield table, min(1.0, rows / max(1, segment.nominal))
        return
    fraction = 0.0

    def chunks() -> Iterator[bytes]:
        """Yield the bytes of a segment of text, cut as :func:`read_text` cuts them."""
        nonlocal fraction
        size = max(1, segment.size)
        with open_text(segment.path) as file:
            if segment.format == "whole":
                packed = cast(IO[bytes], file.fileobj if isinstance(file, gzip.GzipFile) else file)
                while chunk := file.read(block_bytes):
                    fraction = min(1.0, packed.tell() / size)
                    yield chunk
                return
            position = segment.start
            file.seek(position)
            stop = segment.nominal + block_bytes
            while chunk := file.read(min(stop, segment.stop) - position):
                position += len(chunk)
                stop += block_bytes
                fraction = (position - segment.start) / size
                yield chunk

    for table in read_span(
        segment.path, chunks(), layout, is_first=segment.is_first, is_last=segment.is_last
    ):
        yield table, fraction
