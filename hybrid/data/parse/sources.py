"""The files of a split as blocks of parsed rows: CSV, Criteo's TSV, Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import ColumnSection, DataSection, RunConfig, TaskSection
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import PEEK_BYTES, TableBlock, column_names, read_stream, read_text
from hybrid.data.parse.input_files import list_files
from hybrid.data.parse.parquet_blocks import parquet_names, read_parquet
from hybrid.data.parse.text_lines import BLOCK_BYTES, open_text
from hybrid.data.values import column_values
from hybrid.data.values.dates import seconds
from hybrid.data.values.features import feature
from hybrid.data.values.invalid_rows import InvalidRow, InvalidRowLog, Reason, shown_cell
from hybrid.data.values.targets import Targets, TargetSpec
from hybrid.errors import ConfigError, DataError
from hybrid.primitives.progress import Progress, ignore_progress
from hybrid.storage.remote_path import StoragePath


class RawBlock(NamedTuple):
    """B valid rows, parsed but not yet encoded.

    Attributes:
        dense_BF: float64, NaN if missing.
        sparse: for each sparse feature a dictionary array of B strings, null if missing, or an array of B
            lists of such (several ids a sample), or of B numbers if buckets hold them.
        targets: labels, weights and groups, or None.
        source_rows_B: int64, 0-based row over all files in turn; invalid rows count, blank lines do not.
        weights: an array of B lists of float32 for each sparse feature whose ids have weights.
        split_B: the value of ``data.split_column``: int64, equal for equal values, or float64, times in
            seconds; else None.
        beside: the columns of ``Layout.beside`` as the file holds them, by name.
    """

    dense_BF: npt.NDArray[np.float64]
    sparse: tuple[pa.Array, ...]
    targets: Targets | None
    source_rows_B: npt.NDArray[np.int64]
    weights: tuple[pa.Array, ...] = ()
    split_B: npt.NDArray[np.int64] | npt.NDArray[np.float64] | None = None
    beside: Mapping[str, pa.Array] = MappingProxyType({})

    def select(self, mask_B: npt.NDArray[np.bool_]) -> RawBlock:
        """Return the rows of a mask."""
        keep = pa.array(mask_B)
        return RawBlock(
            self.dense_BF[mask_B],
            tuple(column.filter(keep) for column in self.sparse),
            None if self.targets is None else self.targets.select(mask_B),
            self.source_rows_B[mask_B],
            tuple(lists.filter(keep) for lists in self.weights),
            None if self.split_B is None else self.split_B[mask_B],
            {name: column.filter(keep) for name, column in self.beside.items()},
        )


@dataclass(frozen=True)
class Source:
    """The rows of some files; each pass over ``blocks`` reads them anew, in the same blocks.

    Attributes:
        files: in their order.
        data: defines how they are read.
        with_labels: whether every row must have its labels; otherwise labels are not read.
        block_bytes: text that is read at a time.
        report: receives progress, one line at a time.
        tasks: the sections [tasks.NAME].
        columns: the sections [columns.NAME].
        text: read instead of the one file, whose path is only a name then; there is one pass over it.
        beside: columns of the files to return as they are, each after what names it.
    """

    files: tuple[StoragePath, ...]
    data: DataSection
    with_labels: bool = True
    block_bytes: int = BLOCK_BYTES
    report: Callable[[str], None] = ignore_progress
    tasks: Mapping[str, TaskSection] = field(default_factory=dict)
    columns: Mapping[str, ColumnSection] = field(default_factory=dict)
    text: Iterator[bytes] | None = None
    beside: tuple[tuple[str, str], ...] = ()

    def blocks(self, log: InvalidRowLog | None = None) -> Iterator[RawBlock]:
        """Yield parsed rows, block by block.

        Raises:
            ConfigError: a key of the data section does not fit the files.
            DataError: a file cannot be read, holds no valid row, or an invalid row is an error.
        """
        layout = self.layout
        log = log or self.new_log()
        first_row, progress = 0, Progress(self.report, "reading rows")
        for path in self.files:
            log.start_file()
            if self.text is not None:
                tables = read_stream(path, self.text, layout)
            elif self.data.format == "parquet":
                tables = read_parquet(path, layout)
            else:
                tables = read_text(path, layout, self.block_bytes)
            for table in tables:
                block, invalid = parse(path, table, layout, first_row)
                log.add(path, len(block.source_rows_B), invalid)
                first_row += table.num_rows
                progress.add(table.num_rows)
                if len(block.source_rows_B):
                    yield block
            log.finish_file(path)

    @property
    def layout(self) -> Layout:
        """The columns of the files."""
        layout = Layout.of(self.data, self.columns, self.tasks, with_labels=self.with_labels)
        return replace(layout, beside=self.beside)

    @property
    def targets(self) -> TargetSpec:
        """Labels, weights and groups of the rows."""
        return self.layout.targets

    def new_log(self) -> InvalidRowLog:
        """Return a log that treats invalid rows as the data section requires."""
        return InvalidRowLog(self.data.max_invalid_fraction)


def check_columns(config: RunConfig) -> None:
    """Check that the first training file and the first test file have the columns of the configuration.

    This needs no process of a cluster.

    Raises:
        ConfigError: a file lacks a column, or a key does not fit the files.
        DataError, StorageError: a file cannot be read.
    """
    data = config.data
    if data.format == "synthetic":
        return
    layout = Layout.of(data, config.columns, config.tasks)
    first = list_files(data.path, "data.path")[:1]
    if data.test_path:
        first += list_files(data.test_path, "data.test_path")[:1]
    for path in first:
        if data.format == "parquet":
            layout.require(parquet_names(path), path)
        else:
            with open_text(path) as file:
                names, _ = column_names(path, file.read(PEEK_BYTES), layout)
            layout.require(names, path)


def parse(
    path: StoragePath, table: TableBlock, layout: Layout, first_row: int = 0
) -> tuple[RawBlock, list[InvalidRow]]:
    """Return the valid rows of ``table``, and its invalid rows, each with the first reason.

    Args:
        path: of the file, for messages.
        first_row: of the table, among all rows.

    Raises:
        DataError: the type of a column is wrong.
    """
    valid = np.ones(len(table.lines), bool)
    invalid = list(table.invalid)

    def reject(mask: npt.NDArray[np.bool_], reason: Reason, name: str, expected: str) -> None:
        for i in np.flatnonzero(mask & valid).tolist():
            found = f"{name} is {shown_cell(table.columns[name], i)}, expected {expected}"
            invalid.append(InvalidRow(int(table.lines[i]), reason, found))
        valid[mask] = False

    data = layout.data
    try:
        targets = layout.targets.read(table.columns, reject) if layout.with_labels else None
        dense_BF = np.empty((len(valid), len(layout.dense)))
        for f, column in enumerate(layout.dense):
            dense_BF[:, f], wrong = column_values.numbers(table.columns[column.source], data.missing)
            reject(wrong, Reason.NUMBER, column.source, "a finite number")
        features = [feature(column, table.columns, data.missing, reject) for column in layout.sparse]
        split_B: npt.NDArray[np.int64] | npt.NDArray[np.float64] | None = None
        if name := data.split_column:
            if column_values.is_list(table.columns[name]):
                raise ConfigError("data.split", "must be a column of one value a row, and holds lists", name)
            if data.split_call.name == "time":
                split_B, wrong = seconds(table.columns[name], data.missing)
                expected = "a number, or a date such as 2024-01-31 09:30:00"
                reject(wrong | np.isnan(split_B), Reason.SPLIT, name, expected)
            else:
                split_B, wrong = column_values.hashes(table.columns[name], data.missing)
                reject(wrong, Reason.SPLIT, name, "a value to split rows by")
        block = RawBlock(
            dense_BF,
            tuple(each.values for each in features),
            targets,
            first_row + table.rows,
            tuple(each.weights for each in features if each.weights is not None),
            split_B,
            {name: table.columns[name] for _, name in layout.beside},
        )
        return (block if valid.all() else block.select(valid)), invalid
    except MemoryError:
        raise
    except pa.ArrowException as error:
        advice = "check the types of the columns of data.sparse, data.dense and of labels"
        raise DataError(f"{path}: {error}; {advice}") from error
