"""All files of a split, as blocks of parsed rows: CSV, Criteo's TSV, Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import ColumnSection, DataSection, TaskSection
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import TableBlock, read_stream, read_text
from hybrid.data.parse.parquet_blocks import read_parquet
from hybrid.data.parse.text_lines import BLOCK_BYTES
from hybrid.data.values import column_values
from hybrid.data.values.dates import seconds
from hybrid.data.values.features import feature
from hybrid.data.values.invalid_rows import InvalidRow, InvalidRowLog, Reason, Reject, shown_cell
from hybrid.data.values.targets import Targets, TargetSpec
from hybrid.errors import ConfigError, DataError
from hybrid.primitives.progress import Progress, ignore_progress
from hybrid.storage.remote_path import StoragePath


class RawBlock(NamedTuple):
    """B good rows, parsed but not yet encoded.

    Attributes:
        dense_BF: float64, NaN where missing.
        sparse: for each sparse feature a pyarrow dictionary array of B strings, null where missing, or an
            array of B lists of such (several ids a sample), or of B numbers where these go into buckets.
        targets: labels, weights and groups, or None where they were not asked for.
        source_rows_B: int64, 0-based row over all files in turn; bad rows count, blank lines do not.
        weights: an array of B lists of float32 for each sparse feature whose ids have weights.
        split_B: what tells training rows from test rows, where ``data.split_column`` does: int64, the same
            for equal values, or float64, times in seconds; else None.
        beside: columns of the file, as they are in it, by name: those of ``Layout.beside``.
    """

    dense_BF: npt.NDArray[np.float64]
    sparse: tuple[Any, ...]
    targets: Targets | None
    source_rows_B: npt.NDArray[np.int64]
    weights: tuple[Any, ...] = ()
    split_B: npt.NDArray[np.int64] | npt.NDArray[np.float64] | None = None
    beside: Mapping[str, Any] = MappingProxyType({})

    def select(self, mask_B: npt.NDArray[np.bool_]) -> RawBlock:
        """The rows where ``mask_B`` holds."""
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
        files: what is read, in order.
        data: the section that says how.
        with_labels: whether every row must have its labels; otherwise these are not looked at.
        block_bytes: text read at a time.
        report: receives progress, one line at a time.
        check: called before every block; what it raises ends the pass.
        tasks: the sections [tasks.NAME].
        columns: the sections that say how columns are made.
        text: what is read in place of the one file, which then is but a name; there is one pass over it.
        beside: columns of the files to give as they are, each after what names it.
    """

    files: tuple[StoragePath, ...]
    data: DataSection
    with_labels: bool = True
    block_bytes: int = BLOCK_BYTES
    report: Callable[[str], None] = ignore_progress
    check: Callable[[], None] = lambda: None
    tasks: Mapping[str, TaskSection] = field(default_factory=dict)
    columns: Mapping[str, ColumnSection] = field(default_factory=dict)
    text: Iterator[bytes] | None = None
    beside: tuple[tuple[str, str], ...] = ()

    def blocks(self, log: InvalidRowLog | None = None) -> Iterator[RawBlock]:
        """Parsed rows, block by block.

        Raises:
            ConfigError: a key of the data section does not fit the files.
            DataError: a file cannot be read, holds no usable row, or bad rows are not to be skipped.
        """
        layout = self.layout
        log = log or self.new_log()
        first_row, progress = 0, Progress(self.report, "reading rows")
        for path in self.files:
            log.start_file()
            for table in self._tables(path, layout):
                self.check()
                block, bad = parse_of(path, table, layout, first_row)
                log.add(path, len(block.source_rows_B), bad)
                first_row += table.num_rows
                progress.add(table.num_rows)
                if len(block.source_rows_B):
                    yield block
            log.finish_file(path)

    def _tables(self, path: StoragePath, layout: Layout) -> Iterator[TableBlock]:
        if self.text is not None:
            return read_stream(path, self.text, layout)
        if self.data.format == "parquet":
            return read_parquet(path, layout)
        return read_text(path, layout, self.block_bytes)

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
        """A log that treats bad rows as the data section says."""
        return InvalidRowLog(self.data.max_invalid_fraction)


def parse_of(
    path: StoragePath, table: TableBlock, layout: Layout, first_row: int
) -> tuple[RawBlock, list[InvalidRow]]:
    """As :func:`parse`, of rows of the file ``path``; DataError where a column is of a wrong type."""
    try:
        return parse(table, layout, first_row)
    except MemoryError:
        raise
    except pa.ArrowException as error:
        advice = "check the types of the columns of data.dense, data.sparse and of labels"
        raise DataError(f"{path}: {error}; {advice}") from error


def parse(table: TableBlock, layout: Layout, first_row: int = 0) -> tuple[RawBlock, list[InvalidRow]]:
    """The good rows of ``table``, and all its bad ones; a row is bad for the first reason found.

    Args:
        first_row: of the table, among all rows.
    """
    good = np.ones(len(table.lines), bool)
    bad = list(table.bad)

    def reject(mask: npt.NDArray[np.bool_], reason: Reason, name: str, expected: str) -> None:
        for i in np.flatnonzero(mask & good):
            value = shown_cell(table.columns[name], int(i))
            bad.append(InvalidRow(int(table.lines[i]), reason, f"{name} is {value}, expected {expected}"))
        good[mask] = False

    data, targets = layout.data, None
    if layout.with_labels:
        targets = layout.targets.read(table.columns, reject)
    dense_BF = np.empty((len(good), len(layout.dense)))
    for f, column in enumerate(layout.dense):
        dense_BF[:, f], wrong = column_values.numbers(table.columns[column.source], data.missing)
        reject(wrong, Reason.NUMBER, column.source, "a finite number")
    features = [feature(column, table.columns, data.missing, reject) for column in layout.sparse]
    sparse = tuple(each.values for each in features)
    weights = tuple(each.weights for each in features if each.weights is not None)
    split_B = _split_values(table.columns[data.split_column], data, reject) if data.split_column else None
    beside = {name: table.columns[name] for _, name in layout.beside}
    block = RawBlock(dense_BF, sparse, targets, first_row + table.rows, weights, split_B, beside)
    return (block if good.all() else block.select(good)), bad


def _split_values(
    column: Any, data: DataSection, reject: Reject
) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    name = data.split_column
    if column_values.is_list(column):
        raise ConfigError("data.split", "must be a column of one value a row, and holds lists", name)
    if data.split_call.name == "time":
        times_B, wrong_B = seconds(column, data.missing)
        reject(
            wrong_B | np.isnan(times_B), Reason.SPLIT, name, "a number, or a date such as 2024-01-31 09:30:00"
        )
        return times_B
    hashes_B, wrong_B = column_values.hashes(column, data.missing)
    reject(wrong_B, Reason.SPLIT, name, "a value to split rows by")
    return hashes_B
