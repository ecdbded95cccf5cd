"""Raw rows as batches: from tables in memory, files, a text stream, or the test rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.batch import Batch
from hybrid.data.batches import BatchLoader
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DataManifest, DatasetReport
from hybrid.data.dataset.prepared_dataset import LabelSums, PreparedDataset, block_batch, label_reports
from hybrid.data.encode.feature_encoder import count_unknown, report_unknown
from hybrid.data.parse.column_layout import Layout, TableBlock, create_file_section
from hybrid.data.parse.input_files import find_side_files, list_files
from hybrid.data.parse.side_tables import read_side_tables
from hybrid.data.parse.sources import parse, read_blocks
from hybrid.data.prepare.preparation import ensure_prepared, open_split
from hybrid.data.values.column_values import convert_maps, decode_dictionaries
from hybrid.data.values.invalid_rows import InvalidRowLog
from hybrid.errors import ConfigError, DataError
from hybrid.inference.trained_run import TrainedRun
from hybrid.primitives.progress import ignore_progress
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath

_TABLE = Path("encode(columns)")  # stands for the file in error messages
_INPUT = "--input"
_BLOCK_ROWS = 1 << 16  # rows per block of a prepared data set


class RowBlock(NamedTuple):
    """B encoded rows. ``source_rows_B`` has their positions in the input, counted with invalid rows."""

    batch: Batch  # the encoded values; the labels are NaN if they are not read
    source_rows_B: npt.NDArray[np.int64]
    passthrough: Mapping[str, Any] = {}  # requested columns of the input by name, unchanged


def table_batch(trained: TrainedRun, columns: Any) -> Batch:
    """Encode raw columns as a batch; for ``columns`` and errors, see :meth:`TrainedModule.encode`."""
    try:
        table = pa.table(columns)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{_TABLE}: cannot be read as columns of one length: {error}") from error
    layout = _layout(trained)
    layout.require(table.column_names, _TABLE)
    arrays = {name: convert_maps(table[name].combine_chunks()) for name in layout.required}
    rows = np.arange(table.num_rows)
    table_block = TableBlock(arrays, rows, rows, table.num_rows, table.num_rows, [])
    block, invalid = parse(_TABLE, table_block, layout)
    if invalid:
        raise DataError(f"{_TABLE}: row {invalid[0].line}: {invalid[0].found}")
    return block_batch(trained.encoder.encode(block), trained.encoder.input_spec)


def held_out_rows(
    trained: TrainedRun, *, passthrough: Sequence[tuple[str, str]] = (), progress: Callable[[str], None]
) -> Rows:
    """Return the test rows of a model's run; prepare the data again if they are no longer cached.

    Args:
        passthrough: columns of the files to return unchanged, each as (command-line option, column).

    Raises:
        ConfigError: the run has no test rows, or no files with the columns to pass through.
        DataError: the files are missing or have changed.
    """
    config, copy = trained.config, trained.stored.files_folder / dataset_manifest.COPY_NAME
    if config.data.is_stream:
        raise ConfigError(_INPUT, "must name files: the run was trained on a stream, without test rows")
    if not storage.exists(copy):
        raise ConfigError(_INPUT, "must name files: the run was trained on batches of a custom loop")
    if passthrough and config.data.format == "synthetic":
        raise ConfigError(passthrough[0][0], "needs --input: the synthetic click log has no files")
    rule = "name files with --input"
    trained_on = DataManifest.read(copy, rule)
    prepared = ensure_prepared(config, progress, rule)
    trained_on.check_same(DataManifest.read(prepared / dataset_manifest.FILE_NAME), rule)
    dataset = open_split(prepared, "test", config.data)
    if not dataset.num_samples:
        raise ConfigError(_INPUT, "must name files: the run has no test rows (data.split = none)")
    if not passthrough:
        return PreparedRows(dataset)
    files = list_files(config.data.test_path or config.data.path, "data.test_path")
    return SourceRows(trained, files, passthrough, progress, selection=dataset.source_rows)


def _layout(
    trained: TrainedRun,
    files: Sequence[StoragePath] = (),
    with_labels: bool = False,
    passthrough: Sequence[tuple[str, str]] = (),
) -> Layout:
    """Return the columns that a model reads from ``files``, or from a table in memory if there are none."""
    config = trained.config
    data = create_file_section(config, files, trained.encoder.input_spec)
    if not files:  # a table in memory has the columns of side tables
        data = replace(data, joins=())
    layout = Layout.of(data, config.columns, config.tasks, with_labels=with_labels, passthrough=passthrough)
    tables = read_side_tables(data, layout.required, find_side_files(data))
    return replace(layout, side_tables=tables)


@dataclass
class PreparedRows:
    dataset: PreparedDataset

    @property
    def report(self) -> DatasetReport:
        """The numbers of rows, of invalid rows, and of unknown values, from the preparation."""
        return self.dataset.report

    def blocks(self) -> Iterator[RowBlock]:
        """Yield all rows, in their order."""
        first = 0
        with BatchLoader(self.dataset, batch_size=_BLOCK_ROWS).batches(0) as batches:
            for batch in batches:
                stop = first + len(batch.labels)
                yield RowBlock(batch, self.dataset.source_rows[first:stop])
                first = stop


@dataclass
class SourceRows:
    """Rows of files in the format of the training files.

    Raise ConfigError if ``text`` is given for Parquet, ConfigError or DataError if a side table is invalid.

    Args:
        passthrough: further columns to return unchanged, each as (command-line option, column).
        with_labels: whether every row must have its labels.
        text: blocks of CSV or TSV that replace the content of the only file; None to read the files.
        optional: a column of ``data.sparse``; the files may lack the input columns of this column.
        selection: numbers of the rows to use, ascending, counted from 0 over all files; None for all rows.
    """

    trained: TrainedRun
    files: Sequence[StoragePath]
    passthrough: Sequence[tuple[str, str]] = ()
    progress: Callable[[str], None] = ignore_progress
    with_labels: bool = False
    text: Iterator[bytes] | None = None
    optional: str = ""
    selection: npt.NDArray[np.int64] | None = None
    layout: Layout = field(init=False)
    # The number of rows, invalid rows and unknown values; set after the last block.
    report: DatasetReport = field(init=False)

    def __post_init__(self) -> None:
        self.layout = _layout(self.trained, self.files, self.with_labels, self.passthrough)
        sources = [column.sources for column in self.layout.sparse if column.name == self.optional]
        self.layout = replace(self.layout, optional=frozenset(chain(*sources)))
        if self.text is not None and self.layout.data.format == "parquet":
            rule = "must name files if data.format is parquet: Parquet cannot be read from a stream"
            raise ConfigError(_INPUT, rule, "-")

    def blocks(self) -> Iterator[RowBlock]:
        """Yield the valid rows, or only the rows of ``selection``, in order; then set ``report``.

        Raises:
            ConfigError: the input lacks a column.
            DataError: the input cannot be read, has no valid row or too many invalid rows, or lacks rows of
                ``selection``.
        """
        layout, encoder = self.layout, self.trained.encoder
        log = InvalidRowLog(layout.data.max_invalid_fraction)
        unknown, num_rows = np.zeros((3, len(encoder.sparse)), np.int64), 0
        labels: list[LabelSums] = []
        for block in read_blocks(self.files, layout, log, report=self.progress, text=self.text):
            if self.selection is not None:
                rows_B = block.source_rows_B
                starts_B = np.searchsorted(self.selection, rows_B)
                block = block.select(starts_B < np.searchsorted(self.selection, rows_B, side="right"))
            if not (size := len(block.source_rows_B)):
                continue
            encoded = encoder.encode(block)
            unknown += count_unknown(encoder, block, encoded)
            num_rows += size
            if block.targets is not None:
                labels.append(LabelSums.of(block.targets))
            batch = block_batch(encoded, encoder.input_spec)
            passthrough = {name: decode_dictionaries(each) for name, each in block.passthrough.items()}
            yield RowBlock(batch, block.source_rows_B, passthrough)
        if not num_rows:
            raise DataError(f"{', '.join(map(str, self.files))}: no rows")
        of_tasks = label_reports(layout.targets.tasks, labels) if layout.with_labels else ()
        self.report = DatasetReport(num_rows, of_tasks, log.finish(), report_unknown(encoder, unknown))
        if self.selection is not None and num_rows != len(self.selection):
            rule = "the valid rows are not those of the training run; name files with --input"
            raise DataError(f"{self.files[0]}: {rule}")


Rows: TypeAlias = PreparedRows | SourceRows
