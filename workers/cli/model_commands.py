"""``hybrid evaluate``, ``predict`` and ``export``: use a trained model in one process."""

import csv
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hybrid.checkpoint.checkpoint_folders import CURRENT_FILE
from hybrid.checkpoint.deltas import DeltaChain
from hybrid.data.dataset.dataset_manifest import DatasetReport
from hybrid.data.parse.delimited_text import BLOCK_BYTES, STDIN, read_descriptor
from hybrid.data.parse.input_files import list_files
from hybrid.data.values.column_values import is_list
from hybrid.errors import ConfigError, HybridError
from hybrid.inference import program_export
from hybrid.inference.followed_run import follow_changes
from hybrid.inference.items import SEARCHED, Items
from hybrid.inference.raw_rows import Rows, SourceRows, held_out_rows
from hybrid.inference.table_export import TableExport
from hybrid.inference.trained_module import ConfiguredModule, TrainedModule, prediction_columns
from hybrid.inference.trained_run import TrainedRun
from hybrid.metrics import Predictions
from hybrid.primitives.progress import ignore_progress
from hybrid.storage import files as storage
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import RemotePath, StoragePath
from workers.cli.arguments import STREAM
from workers.console import data_notes, print_line, transient_status, unknown_fractions
from workers.exit_codes import ExitCode
from workers.run_folder.run_access import OTHER_OUTPUT, run_write_errors

ROW = "row"  # the column of row numbers
STDOUT = Path(STREAM)
_ITEM_SEPARATOR, _PAIR_SEPARATOR = "|", ":"  # of a list in a CSV field
_KEEP = "--keep"
_GIVEN = "the paths given"  # in errors
_LABEL_WIDTH = 20
_EXPORTED_STEP = re.compile(r"step-[0-9]{8,18}")
_KEPT_EXPORTS = 2  # a server may still read the folder before the newest
_PROGRAMS = {"program", "onnx"}  # formats that need the tables in memory
_warn = partial(print_line, to_stderr=True)

# Appends rows to a file: pyarrow arrays of one length by name, with the same names each time.
WriteBlock: TypeAlias = Callable[[Mapping[str, Any]], None]


def evaluate(
    folder: StoragePath, inputs: Sequence[str], trust_code: bool = False, module: str | None = None
) -> dict[str, Any]:
    """Print the metrics of a trained model on labeled files; if ``inputs`` is empty, on the run's test rows.

    Return a summary for JSON. See :func:`predict` for arguments and errors; but here, "-" is a file name.
    """
    model = _read_model(folder, trust_code, module, uses_data=not inputs)
    with transient_status() as report_progress:
        if inputs:
            files = list_files(inputs, _GIVEN)
            rows: Rows = SourceRows(model.trained, files, progress=report_progress, with_labels=True)
        else:
            rows = held_out_rows(model.trained, progress=report_progress)
        metrics = measure(model, rows)
    width = max(_LABEL_WIDTH, *(len(name) + 1 for name in metrics))  # names may have a task as prefix
    print_line(f"{'checkpoint':<{width}}{model.trained.origin}")
    for name, value in metrics.items():
        number = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        print_line(f"{name.replace('_', ' '):<{width}}{number}")
    for line in _row_notes(rows.report):
        print_line(line)
    return {**_summary(model, rows.report), "metrics": metrics}


def _summary(model: TrainedModule, report: DatasetReport) -> dict[str, Any]:
    return {
        "checkpoint": str(model.trained.stored.folder),
        "num_rows": report.num_rows,
        "bad_rows": report.bad_rows.total,
        "unknown_values": {column.name: column.fraction for column in report.unknown},
    }


def measure(model: TrainedModule, rows: Rows) -> dict[str, float]:
    config = model.trained.config
    items = None if config.retrieval is None else Items(model, "tasks.*.type")
    parts = []
    for batch, *_ in rows.blocks():
        predictions = model.predict(batch)
        parts.append(predictions if items is None else items.rank(predictions, batch))
    return Predictions.concatenate(parts).metrics(config.all_tasks, is_weighted=config.data.weighted_metrics)


def predict(
    folder: StoragePath,
    inputs: Sequence[str],
    output: StoragePath,
    keep: Sequence[str] = (),
    trust_code: bool = False,
    module: str | None = None,
    *,
    top_k: int | None = None,
) -> dict[str, Any]:
    """Write, for each valid row, its number in the input, the columns ``keep``, and its predictions.

    Rows are read, predicted and written in blocks, so the memory does not depend on the number of rows. The
    result is a summary for JSON.

    Args:
        folder: a run, of which the best checkpoint is used, or a checkpoint.
        inputs: files with or without labels; ["-"] for standard input; empty for the run's test rows.
        output: a new CSV or Parquet file, local or in a store, or :data:`STDOUT`.
        keep: columns of the input to write as well.
        trust_code: whether to use code and data paths of the run that have no signature of the user.
        module: FILE.py:FUNCTION that makes the module of a custom training loop; None for a configured run.
        top_k: the number of best items to write for each row of a retrieval task, instead of a score. The
            input then needs no item column.

    Raises:
        ConfigError: the input lacks a column, or an argument does not fit the model.
        CheckpointError: the run has no valid checkpoint.
        DataError: the input cannot be read, has no valid row, or has too many invalid rows.
        HybridError: the output exists or cannot be written.
    """
    check_new(output)
    model = _read_model(folder, trust_code, module, uses_data=not inputs)
    num_outputs, tasks = model.trained.config.num_outputs, model.trained.config.all_tasks
    items = None if top_k is None else Items(model, "--top-k")
    written = SEARCHED if items else prediction_columns(tasks, torch.zeros(0, num_outputs))
    names = (ROW, *written)
    for index, name in enumerate(keep):
        if name in names:
            raise ConfigError(_KEEP, "is the name of another column of the output", name)
        if name in keep[:index]:
            raise ConfigError(_KEEP, "names a column twice", name)
    passthrough = [(_KEEP, name) for name in keep]
    item = "" if items is None else items.column  # a search needs no item column
    # No progress while rows go to standard output or come from standard input.
    is_quiet = output == STDOUT or STREAM in inputs
    with nullcontext(ignore_progress) if is_quiet else transient_status() as report_progress:
        if not inputs:
            rows = held_out_rows(model.trained, passthrough=passthrough, progress=report_progress)
        elif list(inputs) == [STREAM]:
            rows = _standard_input(model.trained, passthrough, item, at_once=output == STDOUT)
        else:
            files = list_files(inputs, _GIVEN)
            rows = SourceRows(model.trained, files, passthrough, report_progress, optional=item)
        with prediction_file(output) as write:
            for block in rows.blocks():
                outputs_BO = model.predict(block.batch).tie_equal_samples().outputs
                if items is not None and top_k is not None:
                    columns = items.search(outputs_BO, top_k)
                else:
                    tensors = prediction_columns(tasks, outputs_BO)
                    columns = {name: pa.array(values_B.numpy()) for name, values_B in tensors.items()}
                write({ROW: pa.array(block.source_rows_B), **block.passthrough, **columns})
    where = "standard output" if output == STDOUT else str(output)
    report = rows.report
    wrote = f"wrote {report.num_rows:,} predictions to {where}; checkpoint: {model.trained.origin}"
    for line in (wrote, *_row_notes(report)):
        print_line(line, to_stderr=output == STDOUT)
    return {**_summary(model, report), "output": str(output)}


def _standard_input(
    trained: TrainedRun, passthrough: Sequence[tuple[str, str]], optional_column: str, *, at_once: bool
) -> SourceRows:
    """Return the rows of standard input; if ``at_once``, in blocks of the rows that have arrived so far."""
    text = read_descriptor(0, BLOCK_BYTES, at_once=at_once)
    rows = SourceRows(trained, (STDIN,), passthrough, text=text, optional=optional_column)
    if os.isatty(0):
        names = ", ".join(rows.layout.required)
        header = "" if rows.layout.data.columns else ", after a line with their names"
        print_line(f"waiting for rows with {names}{header}; Ctrl-D ends the input", to_stderr=True)
    return rows


@contextmanager
def prediction_file(output: StoragePath) -> Iterator[WriteBlock]:
    """Yield a function that appends rows to a CSV or Parquet file; HybridError if it cannot be written.

    The file appears at the end of the block. Rows for :data:`STDOUT` are not buffered; if stdout is a
    closed pipe, the process exits.
    """
    if output == STDOUT:
        with run_write_errors(Path("standard output"), OTHER_OUTPUT):
            try:
                # sys.stdout would ignore errors at the end of the process.
                with open(1, "wb", closefd=False) as file:
                    yield _csv_writer(file, "\n", file.flush)
            except BrokenPipeError:
                sys.exit(ExitCode.FAILED)
        return
    with run_write_errors(output, OTHER_OUTPUT), ExitStack() as stack:
        writer = stack.enter_context(storage.open_writer(output))
        is_parquet = output.suffix == ".parquet"
        yield _parquet_writer(writer, stack, output) if is_parquet else _csv_writer(writer)


def _csv_writer(
    file: storage.Writer, line_end: str = "\r\n", flush: Callable[[], object] = lambda: None
) -> WriteBlock:
    has_header = False

    def write(columns: Mapping[str, Any]) -> None:
        nonlocal has_header
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator=line_end)
        if not has_header:
            writer.writerow(columns)
            has_header = True
        writer.writerows(zip(*map(_fields, columns.values()), strict=True))
        file.write(text.getvalue().encode())
        flush()

    return write


def _fields(column: Any) -> list[Any]:
    """Return a column as CSV fields. A list is one field, such as ``7|9``, or ``7:0.5|9:1`` with weights."""
    if not is_list(column):
        return list(column.to_pylist())

    def text(item: Any) -> str:
        return _PAIR_SEPARATOR.join(map(str, item.values())) if isinstance(item, dict) else str(item)

    return [None if each is None else _ITEM_SEPARATOR.join(map(text, each)) for each in column.to_pylist()]


def _parquet_writer(file: storage.Writer, stack: ExitStack, output: StoragePath) -> WriteBlock:
    writer: pq.ParquetWriter | None = None

    def write(columns: Mapping[str, Any]) -> None:
        nonlocal writer
        table = pa.table(dict(columns))
        try:
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(file, table.schema))
            writer.write_table(table)
        except (ValueError, pa.ArrowException) as error:  # such as a column that changes its type
            raise HybridError(f"{output}: cannot be written: {error}") from error

    return write


def export_run(
    folder: StoragePath,
    output: StoragePath,
    formats: Sequence[str],
    dtype: str | None,
    trust_code: bool = False,
    module: str | None = None,
) -> None:
    """Write a trained model into a new folder, local or in a store, and print what was written.

    Args:
        folder: a run, of which the best checkpoint is used, or a checkpoint.
        formats: one or more of "program", "onnx", "tables" and "items".
        dtype: data type of the exported tables; None for the run's data type. If ``dtype`` is narrower, the
            metrics before and after the conversion are printed, or the reason why they are unknown.
        trust_code, module: see :func:`predict`.

    Raises:
        HybridError: the output exists or cannot be written, packages are missing, or the model is invalid.
    """
    check_new(output)
    program_export.check_packages(formats)
    # Measuring the loss of precision reads the data of the run.
    model = _read_model(
        folder, trust_code, module, uses_data=dtype is not None, in_memory=bool(_PROGRAMS & {*formats})
    )
    lines = [f"{'checkpoint':<{_LABEL_WIDTH}}{model.trained.origin}"]
    exported: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    if exported is not None and exported.itemsize < model.dtype.itemsize:
        lines += _narrow(model, exported)
    elif exported is not None:
        model.tables.to(exported)
    files = _export(model, output, formats, partial(TableExport(model, exported).write, changes={}))
    lines += [f"{'wrote':<{_LABEL_WIDTH}}{output / name}" for name in files]
    for line in lines:
        print_line(line)


def export_followed(
    run: StoragePath, output: StoragePath, formats: Sequence[str], trust_code: bool = False
) -> None:
    """Export each new model of a run with ``checkpoint.deltas`` into ``output/step-N``, until the run ends.

    ``output/current.json`` names the newest complete folder. The newest two folders are kept.
    """
    program_export.check_packages(formats)
    folders = {each.path.name: each.path for each in storage.list_entries(output) if each.is_folder}
    kept = [path for name, path in folders.items() if _EXPORTED_STEP.fullmatch(name)]
    in_memory = {*formats} != {"tables"}  # the other formats need the changes
    if DeltaChain.read(run) is None:
        print_line(f"waiting for a run with checkpoint.deltas in {run}")
    tables: TableExport | None = None
    for model, changes in follow_changes(run, trust_code=trust_code, in_memory=in_memory):
        if tables is None or tables.model is not model:
            tables, last_folder = TableExport(model), None
        folder = output / f"step-{model.step:08d}"
        if folder in kept:  # exported before the run or this command was interrupted
            kept.remove(folder)
            storage.remove(folder)
        write_tables = partial(tables.write, changes=changes, last_folder=last_folder)
        with run_write_errors(output, OTHER_OUTPUT):
            make_folder(output)
            _export(model, folder, formats, write_tables)
            current = {"folder": folder.name, "step": model.step}
            storage.write_bytes(output / CURRENT_FILE, json.dumps(current).encode())
        last_folder = folder if isinstance(folder, Path) else None
        kept.append(folder)
        while len(kept) > _KEPT_EXPORTS:
            storage.remove(kept.pop(0))
        seconds = time.time() - model.taken_at
        print_line(f"{'wrote':<{_LABEL_WIDTH}}{folder}, {seconds:.1f} s after the end of step {model.step}")


def _export(
    model: TrainedModule,
    output: StoragePath,
    formats: Sequence[str],
    write_tables: Callable[[Path], list[str]],
) -> list[str]:
    """Write a model into a new folder, atomically; use ``write_tables`` for tables. Return the file names."""
    if "onnx" in formats:
        program_export.check_names(model)
    with _new_folder(output) as folder, transient_status() as report_progress:
        files = program_export.write_preprocessing(model, folder)
        if "tables" in formats:
            report_progress("exporting the tables")
            files += write_tables(folder)
        if _PROGRAMS & {*formats}:
            report_progress("exporting the program")
            program = program_export.export_program(model)
            if "program" in formats:
                files += program_export.write_program(program, folder)
            if "onnx" in formats:
                files += program_export.write_onnx(program, model, folder)
        if "items" in formats:
            files += Items(model, "--format items").write(folder)
    return files


def _narrow(model: TrainedModule, dtype: torch.dtype) -> list[str]:
    """Convert the tables to a narrower data type; return lines with the metrics before and after."""
    try:
        rows = held_out_rows(model.trained, progress=ignore_progress)
        before = measure(model, rows)
    except HybridError as error:
        before, notes = {}, [f"{'on test rows':<{_LABEL_WIDTH}}not measured: {error}"]
    model.tables.to(dtype)
    if before:
        after = measure(model, rows)
        notes = [
            f"{name.replace('_', ' ') + ' ':<{_LABEL_WIDTH}}{value:.6f} before, {after[name]:.6f} after"
            for name, value in before.items()
            if name.rpartition(".")[2] not in ("base_rate", "num_samples")
        ]
    return [f"{'tables':<{_LABEL_WIDTH}}{str(dtype).removeprefix('torch.')}", *notes]


@contextmanager
def _new_folder(output: StoragePath) -> Iterator[Path]:
    """Yield a folder to fill. At the end, it is renamed to ``output``; a store gets copies of its files."""
    is_remote = isinstance(output, RemotePath)
    with run_write_errors(output, OTHER_OUTPUT):
        parent = None if is_remote else Path(str(output)).parent
        with tempfile.TemporaryDirectory(prefix=".hybrid-", dir=parent) as scratch:
            folder = Path(scratch, "export")
            make_folder(folder)
            yield folder
            if not is_remote:
                folder.rename(str(output))
                return
            # The preprocessing file comes last: if it exists, the export is complete.
            names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
            try:
                for name in sorted(names, key=program_export.PREPROCESSING_FILE.__eq__):
                    storage.copy(folder / name, output / name)
            except BaseException:
                with suppress(OSError):
                    storage.remove(output)
                raise


def check_new(output: StoragePath) -> None:
    """Raise HybridError if ``output`` exists already; StorageError if its store cannot be read."""
    if output != STDOUT and storage.exists(output):
        raise HybridError(f"{output}: exists already; choose another --output, or remove it")


def _read_model(
    folder: StoragePath, trust_code: bool, module: str | None, *, uses_data: bool, in_memory: bool = False
) -> TrainedModule:
    """Read the model of a checkpoint, or of the best checkpoint of a run.

    If ``in_memory``, read the tables, too. ``uses_data``: whether the caller will read the run's data.
    """
    with transient_status() as report_progress:
        report_progress("reading the model")
        trained = TrainedRun.read(folder, _warn, trust_code, uses_data=uses_data)
        if module is None:
            return ConfiguredModule(trained, in_memory=in_memory)
        from hybrid.inference.custom_module import CustomModule

        return CustomModule(trained, module, in_memory=in_memory)


def _row_notes(report: DatasetReport) -> Iterator[str]:
    if report.unknown:
        yield f"{'unknown values':<{_LABEL_WIDTH}}{unknown_fractions(report.unknown)}"
    yield from data_notes(report)
