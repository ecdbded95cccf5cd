"""Input files as blocks of parsed rows: CSV, Criteo's TSV, Parquet.

A file is cut into segments that are read independently. A segment is a byte range of plain text, a range of
row groups of Parquet, or a complete compressed file. The cuts do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hybrid.data.parse import delimited_text
from hybrid.data.parse.column_layout import Layout, TableBlock
from hybrid.data.parse.input_files import convert_read_errors, path_columns
from hybrid.data.parse.parquet_blocks import BLOCK_ROWS, open_parquet, read_parquet
from hybrid.data.values.invalid_rows import InvalidRow, InvalidRowLog, Reason
from hybrid.data.values.model_columns import ColumnReader, Targets
from hybrid.errors import DataError, HybridError
from hybrid.primitives.progress import Progress, ignore_progress
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath

SEGMENT_BLOCKS = 4
SEGMENT_ROWS = 1 << 18


class RawBlock(NamedTuple):
    """B valid rows with values that are converted, but not yet encoded as the ids that a model reads.

    The array of a sparse feature has strings (a dictionary array, null if missing); lists of strings, if a
    sample may have several ids; int64 keys, with ``Layout.reads_keys``; or numbers, which become buckets.
    """

    dense_BF: npt.NDArray[np.float64]  # the F dense features; NaN if missing
    sparse: tuple[pa.Array, ...]  # an array of length B for each sparse feature
    targets: Targets | None  # labels, weights and groups; None if the layout has no labels
    source_rows_B: npt.NDArray[np.int64]  # 0-based index over all rows of all files, valid or not
    weights: tuple[pa.Array, ...] = ()  # for each sparse feature whose ids have weights, B lists of float32
    held_out_by: Mapping[str, SplitValues] = MappingProxyType({})  # by split: hashes or seconds of a column
    passthrough: Mapping[str, pa.Array] = MappingProxyType({})  # the columns ``Layout.passthrough`` by name

    def select(self, mask_B: npt.NDArray[np.bool_]) -> RawBlock:
        """Return the rows where ``mask_B`` is true."""
        keep = pa.array(mask_B)
        return RawBlock(
            self.dense_BF[mask_B],
            tuple(column.filter(keep) for column in self.sparse),
            None if self.targets is None else self.targets.select(mask_B),
            self.source_rows_B[mask_B],
            tuple(lists.filter(keep) for lists in self.weights),
            {split: values_B[mask_B] for split, values_B in self.held_out_by.items()},
            {name: column.filter(keep) for name, column in self.passthrough.items()},
        )


SplitValues: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of an input file, or the whole file."""

    path: StoragePath
    start: int = 0  # the first byte (Parquet: row group)
    stop: int | None = None  # the byte (Parquet: row group) after the segment; None for the end of the file
    size: int = 0  # approximate number of bytes
    rows: int = 0  # number of rows, for Parquet only


def split_files(
    files: Sequence[StoragePath], layout: Layout, min_rows: int = SEGMENT_ROWS, num_bytes: int = 0
) -> list[Segment]:
    """Return the segments of ``files`` in row order.

    A file that cannot be read becomes one segment, and :func:`read_segment` raises the error.

    Args:
        min_rows: minimum number of rows of a segment of a Parquet file, except the last segment.
        num_bytes: approximate size of a segment of text; 0 for 64 MiB.
    """

    def split(path: StoragePath) -> list[Segment]:
        try:
            size = storage.require_file(path).size
            if layout.data.format == "parquet":
                return _split_parquet(path, size, min_rows)
            return _split_text(path, size, layout, num_bytes or SEGMENT_BLOCKS * delimited_text.BLOCK_BYTES)
        except (OSError, pa.ArrowException, HybridError):
            # The same error is raised when the file is read, after the errors of earlier segments.
            return [Segment(path)]

    return [*chain.from_iterable(storage.map_concurrently(split, files))]


def _split_parquet(path: StoragePath, size: int, min_rows: int) -> list[Segment]:
    with open_parquet(path) as source:
        metadata = pq.read_metadata(source)
    count = metadata.num_row_groups
    segments, start, rows = [], 0, 0
    for group in range(count):
        rows += metadata.row_group(group).num_rows
        if rows >= min_rows or group == count - 1:
            stop = group + 1
            segments.append(Segment(path, start, stop, size * (stop - start) // count, rows))
            start, rows = stop, 0
    return segments or [Segment(path)]


def _split_text(path: StoragePath, size: int, layout: Layout, step: int) -> list[Segment]:
    with delimited_text.open_text(path) as file:
        if isinstance(file, delimited_text.PACKED):
            return [Segment(path, size=size)]
    starts = storage.map_concurrently(
        lambda at: delimited_text.find_record_start(path, at, layout), range(step, size, step)
    )
    cuts = pairwise(sorted({0, *starts, size}))
    return [Segment(path, start, stop, stop - start) for start, stop in cuts] or [Segment(path)]


def read_segment(
    segment: Segment, layout: Layout, block_rows: int = BLOCK_ROWS, block_bytes: int = 0
) -> Iterator[TableBlock]:
    """Yield the rows of a segment in blocks. Lines are numbered from 1 in each segment.

    Args:
        block_rows: maximum number of rows of a Parquet block.
        block_bytes: number of bytes to read at once for a block of text; 0 for 16 MiB.

    Raises:
        ConfigError: the file lacks a column, or a side table also has the column.
        DataError: the file is unreadable or of another format; or it has an unusable header, a required
            column twice, a line or row that is too long, or false sizes in its metadata.
        StorageError: a store refuses a request, or the system refuses the path.
    """
    path, start, stop = segment.path, segment.start, segment.stop
    if layout.data.format == "parquet":
        return read_parquet(path, layout, start, stop, block_rows)
    return delimited_text.read_lines(path, layout, start, stop, block_bytes or delimited_text.BLOCK_BYTES)


def read_blocks(
    files: Sequence[StoragePath],
    layout: Layout,
    log: InvalidRowLog,
    *,
    report: Callable[[str], None] = ignore_progress,
    text: Iterator[bytes] | None = None,
) -> Iterator[RawBlock]:
    """Yield the valid rows of ``files`` in blocks.

    Args:
        log: receives the invalid rows, and the numbers of valid rows. The caller calls ``log.finish``.
        text: chunks of text to read instead of a file; ``files`` is then one path, a name for messages.

    Raises:
        ConfigError, DataError, StorageError: see :func:`read_segment` and :func:`parse`.
        DataError: see :meth:`InvalidRowLog.add`; or all rows of the last file are invalid.
    """
    first_row, progress = 0, Progress(report, "reading rows")
    for path in files:
        whole = read_segment(Segment(path), layout)
        for table in whole if text is None else delimited_text.read_stream(path, text, layout):
            block, invalid = parse(path, table, layout, first_row)
            log.add(path, len(block.source_rows_B), invalid)
            first_row += table.num_rows
            progress.add(table.num_rows)
            if len(block.source_rows_B):
                yield block
    log.check_file()


def read_names(path: StoragePath, layout: Layout) -> Sequence[str]:
    """Return the column names of a file by position; for errors, see :func:`read_segment`."""
    if layout.data.format == "parquet":
        with convert_read_errors(path), open_parquet(path) as source:
            names: Sequence[str] = pq.read_schema(source).names
        layout.require(names, path)
        return names
    with delimited_text.open_text(path) as file:
        return delimited_text.read_header(path, file.read(delimited_text.PEEK_BYTES), layout)[0]


def all_columns(path: StoragePath, table: TableBlock) -> dict[str, pa.Array]:
    """Return the columns of a block, and a constant column for each folder ``NAME=VALUE`` of ``path``."""
    of_path = path_columns(path).items()
    constants = {name: pa.repeat(pa.scalar(text, pa.string()), len(table.lines)) for name, text in of_path}
    return constants | table.columns


def parse(
    path: StoragePath, table: TableBlock, layout: Layout, first_row: int = 0
) -> tuple[RawBlock, list[InvalidRow]]:
    """Convert the columns of ``table`` and join side tables. Return the valid rows, and the invalid rows.

    ``first_row`` is the index of the first row of ``table`` among the rows of all files. Raise ConfigError if
    a column holds lists instead of single values. Raise DataError if a column has an unsuitable type. Raise
    the DataError of :meth:`SideTable.join <hybrid.data.parse.side_tables.SideTable.join>`.
    """
    optional = {name: pa.nulls(len(table.lines), pa.string()) for name in layout.optional}
    columns = optional | all_columns(path, table)
    reader = ColumnReader(columns, table.lines, layout.data.missing, layout.reads_keys)
    try:
        for side_table in layout.side_tables:
            columns.update(side_table.join(reader))
        targets = layout.targets.read(reader) if layout.with_labels else None
        dense_BF = np.empty((len(table.lines), len(layout.dense)))
        for f, column in enumerate(layout.dense):
            dense_BF[:, f] = reader.numbers(column.source)
        features = [reader.feature(column) for column in layout.sparse]
        for column in layout.sparse if layout.with_labels else ():
            reader.reject_digit_dates(column)
        held_out_by: dict[str, SplitValues] = {}
        for split, key, by, name, _ in layout.data.holdouts:
            if by == "time":
                held_out_by[split] = reader.seconds(name, key)
            elif by == "column":
                held_out_by[split] = reader.hashes(name, key, Reason.SPLIT, "a value to split rows by")
    except MemoryError:
        raise
    except pa.ArrowException as error:
        keys = " and ".join(key for key, name in layout.keys_and_columns if name == reader.last)
        found = f"column {reader.last} holds {columns[reader.last].type}"
        raise DataError(f"{path}: {found}: {error}; check {keys}") from error
    block = RawBlock(
        dense_BF,
        tuple(ids for ids, _ in features),
        targets,
        first_row + table.rows,
        tuple(weights for _, weights in features if weights is not None),
        held_out_by,
        {name: columns[name] for _, name in layout.passthrough},
    )
    invalid = [*table.invalid, *reader.invalid]
    return (block if reader.valid_B.all() else block.select(reader.valid_B)), invalid
