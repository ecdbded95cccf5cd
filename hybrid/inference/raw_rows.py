"""Raw rows as batches: of tables in memory, of files, of a stream of text, and the test rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from hybrid.batch import Batch
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DataManifest, DatasetReport
from hybrid.data.dataset.prepared_dataset import PreparedDataset, unlabeled_batch
from hybrid.data.encode.feature_encoder import EncodedBlock
from hybrid.data.encode.unknown_values import count_unknown, report_unknown
from hybrid.data.parse.column_layout import Layout, section_for
from hybrid.data.parse.delimited_text import TableBlock
from hybrid.data.parse.input_files import list_files
from hybrid.data.parse.sources import Source, parse
from hybrid.data.prepare.dataset_location import ensure_prepared, open_split
from hybrid.data.prepare.preparation import cache_folder
from hybrid.data.prepare.split_writer import LabelSums, label_reports
from hybrid.data.values.column_values import decoded, is_list, without_maps
from hybrid.data.values.targets import Targets
from hybrid.errors import ConfigError, DataError
from hybrid.inference.trained_run import TrainedRun
from hybrid.input_spec import InputSpec
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath

_TABLE = Path("encode(columns)")  # in errors, in place of a file
_INPUT = "--input"
_BLOCK_ROWS = 1 << 16  # of prepared rows


class RowBlock(NamedTuple):
    """B rows of the input.

    Attributes:
        batch: their encoded values; the labels are NaN if they are not read.
        source_rows_B: int64, the 0-based row over all files. Invalid rows count.
        passthrough: requested columns of the input, as they are in the files, by name.
    """

    batch: Batch
    source_rows_B: npt.NDArray[np.int64]
    passthrough: Mapping[str, Any] = {}


class Rows(Protocol):
    """Rows of the input in blocks.

    Attributes:
        report: the number of rows, invalid rows and unknown values; complete after the last block.
    """

    report: DatasetReport

    def blocks(self) -> Iterator[RowBlock]:
        """All rows, in their order.

        Raises:
            ConfigError: the input lacks a column.
            DataError: the input cannot be read, or has no valid row, or too many invalid ones.
        """
        ...


def table_batch(trained: TrainedRun, columns: Any) -> Batch:
    """Encode a table in memory.

    Args:
        columns: what ``pyarrow.table`` accepts.

    Raises:
        ConfigError: a column is missing.
        DataError: a value is invalid.
    """
    try:
        table = pa.table(columns)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{_TABLE}: cannot be read as columns of one length: {error}") from error
    config, spec = trained.config, trained.encoder.input_spec
    layout = Layout.of(section_for(config, [], spec), config.columns, config.tasks, with_labels=False)
    layout.require(table.column_names, _TABLE)
    arrays = {}
    for name in layout.required:
        column = table[name]
        arrays[name] = without_maps(
            pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        )
    rows = np.arange(table.num_rows)
    table_block = TableBlock(arrays, rows, rows, table.num_rows, table.num_rows, [])
    block, invalid = parse(_TABLE, table_block, layout)
    if invalid:
        raise DataError(f"{_TABLE}: row {invalid[0].line}: {invalid[0].found}")
    return _batch(trained.encoder.encode(block), None, spec)


def file_rows(
    trained: TrainedRun,
    paths: Sequence[str],
    *,
    with_labels: bool,
    passthrough: Sequence[tuple[str, str]] = (),
    report: Callable[[str], None],
) -> Rows:
    """Rows of files that are written like the training files.

    Args:
        paths: files or folders, or URLs of such.
        with_labels: whether every row must have its labels.
        passthrough: columns to read besides, each after the option that names it.
        report: progress callback.
    """
    source = _source(trained, list_files(paths, "the paths given"), with_labels, passthrough, report=report)
    return _SourceRows(trained, source)


def stream_rows(
    trained: TrainedRun,
    stream: StoragePath,
    text: Iterator[bytes],
    passthrough: Sequence[tuple[str, str]] = (),
) -> tuple[Rows, Layout]:
    """Rows of a stream of CSV or TSV, and the columns that it must have.

    Args:
        stream: its name in errors.
        text: blocks of text.

    Raises:
        ConfigError: the model was trained on Parquet.
    """
    source = _source(trained, (stream,), False, passthrough, text=text)
    if source.data.format == "parquet":
        rule = "must name files where data.format is parquet: such a file is read from its end"
        raise ConfigError(_INPUT, rule, "-")
    return _SourceRows(trained, source), source.layout


def held_out_rows(
    trained: TrainedRun, *, passthrough: Sequence[tuple[str, str]] = (), report: Callable[[str], None]
) -> Rows:
    """The test rows of the run of a model, which are prepared again if they are no longer cached.

    Raises:
        ConfigError: the run has no test rows, or no files with the columns to pass through.
        DataError: the files are missing or have changed.
    """
    config, copy = trained.config, trained.stored.parts / dataset_manifest.COPY_NAME
    if not storage.exists(copy):
        raise ConfigError(_INPUT, "must name files: the run was trained on batches of a custom loop")
    if passthrough and config.data.format == "synthetic":
        raise ConfigError(passthrough[0][0], "needs --input: the synthetic click log has no files")
    rule = "name files by --input"
    trained_on = DataManifest.read(copy, rule)
    prepared = ensure_prepared(config, cache_folder(config), report)
    trained_on.check_same(DataManifest.read(prepared / dataset_manifest.FILE_NAME), rule)
    dataset = open_split(prepared, "test", config.data)
    if not dataset.num_samples:
        raise ConfigError(_INPUT, "must name files: the run has no test rows (data.test_fraction = 0)")
    if not passthrough:
        return _PreparedRows(dataset)
    files = list_files(config.data.test_path or config.data.path, "data.test_path")
    source = _source(trained, files, False, passthrough, report=report)
    return _SourceRows(trained, source, dataset.source_rows)


def _source(
    trained: TrainedRun,
    files: Sequence[StoragePath],
    with_labels: bool,
    passthrough: Sequence[tuple[str, str]],
    **options: Any,
) -> Source:
    config = trained.config
    return Source(
        tuple(files),
        section_for(config, files, trained.encoder.input_spec),
        with_labels,
        tasks=config.tasks,
        columns=config.columns,
        beside=tuple(passthrough),
        **options,
    )


@dataclass
class _PreparedRows:
    """Rows of a prepared data set."""

    dataset: PreparedDataset

    def __post_init__(self) -> None:
        self.report = self.dataset.report

    def blocks(self) -> Iterator[RowBlock]:
        first = 0
        with BatchLoader(self.dataset, batch_size=_BLOCK_ROWS).batches(0) as batches:
            for batch in batches:
                stop = first + len(batch.labels)
                yield RowBlock(batch, self.dataset.source_rows[first:stop])
                first = stop


@dataclass
class _SourceRows:
    """Rows of a source, parsed and encoded.

    Attributes:
        selection: int64, the only source rows to use; None for all.
    """

    trained: TrainedRun
    source: Source
    selection: npt.NDArray[np.int64] | None = None
    report: DatasetReport = field(init=False)

    def blocks(self) -> Iterator[RowBlock]:
        source, encoder = self.source, self.trained.encoder
        log, unknown, num_rows = source.new_log(), np.zeros((2, len(encoder.sparse)), np.int64), 0
        labels: list[LabelSums] = []
        for block in source.blocks(log):
            if self.selection is not None:
                block = block.select(np.isin(block.source_rows_B, self.selection))
            if not (size := len(block.source_rows_B)):
                continue
            encoded = encoder.encode(block)
            unknown += count_unknown(encoder, block, encoded)
            num_rows += size
            if block.targets is not None:
                labels.append(LabelSums.of(block.targets))
            batch = _batch(encoded, block.targets, encoder.input_spec)
            passthrough = {name: _without_dictionaries(each) for name, each in block.beside.items()}
            yield RowBlock(batch, block.source_rows_B, passthrough)
        if not num_rows:
            raise DataError(f"{', '.join(map(str, source.files))}: no rows")
        of_tasks = label_reports(source.targets.tasks, labels) if source.with_labels else ()
        self.report = DatasetReport(num_rows, of_tasks, log.finish(), report_unknown(encoder, unknown))
        if self.selection is not None and num_rows != len(self.selection):
            raise DataError(
                f"{source.files[0]}: other rows are valid than in training; name files by --input"
            )


def _without_dictionaries(column: Any) -> Any:
    """Decode a column, and the items of its lists; dictionaries differ from block to block."""
    column = decoded(column)
    if not is_list(column):
        return column
    items = column.type.value_type
    if pa.types.is_struct(items):  # an id and its weight
        fields = [items.field(i) for i in range(items.num_fields)]
        return column.cast(pa.list_(pa.struct([(each.name, _decoded_type(each.type)) for each in fields])))
    return column.cast(pa.list_(_decoded_type(items)))


def _decoded_type(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _batch(encoded: EncodedBlock, targets: Targets | None, spec: InputSpec) -> Batch:
    batch = unlabeled_batch(encoded, spec)
    if targets is None:
        return batch
    labels_BT, weights_BT, groups_B = (None if each is None else torch.from_numpy(each) for each in targets)
    assert labels_BT is not None
    return batch._replace(
        labels=labels_BT.squeeze(1) if labels_BT.shape[1] == 1 else labels_BT,
        weights=weights_BT if weights_BT is None or weights_BT.shape[1] > 1 else weights_BT.squeeze(1),
        groups=groups_B,
    )
