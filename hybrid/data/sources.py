"""All files of a split, as blocks of parsed rows: CSV, Criteo's TSV, Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hybrid.config import DataSection
from hybrid.data import columns
from hybrid.data.bad_rows import BadRow, BadRowLog, Reason
from hybrid.data.layout import Layout
from hybrid.data.text import BLOCK_BYTES, TableBlock, read_text
from hybrid.errors import ConfigError, DataError

PARQUET_BLOCK_ROWS = 65_536


class RawBlock(NamedTuple):
    """B good rows, parsed but not yet encoded.

    Attributes:
        dense_BF: float64, NaN where missing.
        sparse: for each sparse feature a pyarrow array of B strings, null where missing, or of B lists of
            strings (several ids a sample).
        labels_B: uint8 of 0 and 1, or None where labels were not asked for.
        source_rows_B: int64, 0-based row over all files in turn; bad rows count, blank lines do not.
    """

    dense_BF: npt.NDArray[np.float64]
    sparse: tuple[Any, ...]
    labels_B: npt.NDArray[np.uint8] | None
    source_rows_B: npt.NDArray[np.int64]

    def select(self, mask_B: npt.NDArray[np.bool_]) -> RawBlock:
        """The rows where ``mask_B`` holds."""
        keep = pa.array(mask_B)
        return RawBlock(
            self.dense_BF[mask_B],
            tuple(column.filter(keep) for column in self.sparse),
            None if self.labels_B is None else self.labels_B[mask_B],
            self.source_rows_B[mask_B],
        )


def list_files(paths: Sequence[str], key: str) -> tuple[Path, ...]:
    """The files that ``paths`` name, a folder standing for its files by name; hidden ones are left out.

    Raises:
        ConfigError: ``paths`` is empty; the message names ``key``, the configuration key they come from.
        DataError: a path does not exist, or a folder holds no file.
    """
    if not paths:
        raise ConfigError(key, "must name at least one file or folder")
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            found = [p for p in sorted(path.iterdir()) if p.is_file() and p.name[0] not in "._"]
            if not found:
                raise DataError(f"{path}: the folder holds no files; check {key}")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path}: no such file or folder; check {key}")
    return tuple(files)


@dataclass(frozen=True)
class Source:
    """The rows of some files; each pass over ``blocks`` reads them anew, in the same blocks.

    Attributes:
        files: what is read, in order.
        data: the section that says how.
        with_labels: whether every row must have a label; otherwise labels are not looked at.
        block_bytes: text read at a time.
    """

    files: tuple[Path, ...]
    data: DataSection
    with_labels: bool = True
    block_bytes: int = BLOCK_BYTES

    def blocks(self, log: BadRowLog | None = None) -> Iterator[RawBlock]:
        """Parsed rows, block by block.

        Raises:
            ConfigError: a key of the data section does not fit the files.
            DataError: a file cannot be read, holds no usable row, or bad rows are not to be skipped.
        """
        layout = Layout.of(self.data, with_labels=self.with_labels)
        log = log or self.new_log()
        first_row = 0
        for path in self.files:
            log.start_file()
            for table in self._tables(path, layout):
                try:
                    block, bad = _parse(table, layout, first_row)
                except pa.ArrowException as error:
                    advice = "check the types of the columns of data.dense, data.sparse and data.label"
                    raise DataError(f"{path}: {error}; {advice}") from error
                log.add(path, len(block.source_rows_B), bad)
                first_row += table.num_rows
                if len(block.source_rows_B):
                    yield block
            log.finish_file(path)

    def new_log(self) -> BadRowLog:
        """A log that treats bad rows as the data section says."""
        return BadRowLog(self.data.bad_rows == "fail", self.data.max_bad_fraction)

    def _tables(self, path: Path, layout: Layout) -> Iterator[TableBlock]:
        if self.data.format == "parquet":
            return _read_parquet(path, layout)
        return read_text(path, layout, self.block_bytes)


def _parse(table: TableBlock, layout: Layout, first_row: int) -> tuple[RawBlock, list[BadRow]]:
    """The good rows of ``table``, and all its bad ones; a row is bad for the first reason found."""
    good = np.ones(len(table.lines), bool)
    bad = list(table.bad)

    def reject(mask: npt.NDArray[np.bool_], reason: Reason, name: str, expected: str) -> None:
        for i in np.flatnonzero(mask & good):
            value = str(table.columns[name][i].as_py()).strip()
            bad.append(BadRow(int(table.lines[i]), reason, f"{name} is {value!r}, expected {expected}"))
        good[mask] = False

    labels_B = None
    if layout.with_labels:
        positive, negative = layout.positive_labels, layout.negative_labels
        labels_B, unknown = columns.labels(table.columns[layout.label], positive, negative)
        reject(unknown, Reason.LABEL, layout.label, " or ".join(map(repr, (*positive, *negative))))
    dense_BF = np.empty((len(good), len(layout.dense)))
    for f, name in enumerate(layout.dense):
        dense_BF[:, f], wrong = columns.numbers(table.columns[name], layout.missing)
        reject(wrong, Reason.NUMBER, name, "a finite number")
    separator = layout.separator
    sparse = tuple(columns.values(table.columns[name], layout.missing, separator) for name in layout.sparse)
    block = RawBlock(dense_BF, sparse, labels_B, first_row + table.rows)
    return (block if good.all() else block.select(good)), bad


def _read_parquet(path: Path, layout: Layout) -> Iterator[TableBlock]:
    """The wanted columns of a Parquet file; its rows are numbered from 1."""
    try:
        with pq.ParquetFile(path) as file:
            layout.require(file.schema_arrow.names, path)
            names = list(layout.wanted)
            first = 0
            for batch in file.iter_batches(PARQUET_BLOCK_ROWS, columns=names, use_threads=False):
                rows = np.arange(batch.num_rows)
                table = {name: batch.column(name) for name in names}
                yield TableBlock(table, first + rows + 1, rows, batch.num_rows, [])
                first += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: is not a readable Parquet file ({error}); check data.format") from error
