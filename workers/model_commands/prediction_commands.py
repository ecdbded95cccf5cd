"""``hybrid evaluate`` and ``hybrid predict``: use a trained model in one process."""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pyarrow as pa

from hybrid.data.dataset.dataset_manifest import DatasetReport
from hybrid.data.parse.text_lines import BLOCK_BYTES, STDIN, read_descriptor
from hybrid.errors import ConfigError, HybridError
from hybrid.inference.model_outputs import column_names, prediction_columns
from hybrid.inference.raw_rows import Rows, file_rows, held_out_rows, stream_rows
from hybrid.inference.trained_module import TrainedModule
from hybrid.inference.trained_run import TrainedRun
from hybrid.metrics import Predictions
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath
from workers.console.data_notes import data_notes, unknown_fractions
from workers.console.messages import print_line
from workers.console.terminal import passing_status
from workers.model_commands.prediction_file import ROW, STDOUT, prediction_file

_KEEP = "--keep"
_STREAM = "-"  # in place of input files
_LABEL_WIDTH = 20


def evaluate(folder: StoragePath, inputs: Sequence[str], trust_code: bool = False) -> None:
    """Print the metrics of a trained model on labeled files, or on the test rows of its run."""
    model = _read_model(folder, trust_code, uses_paths=not inputs)
    with passing_status() as tell:
        if inputs:
            rows = file_rows(model.trained, inputs, with_labels=True, report=tell)
        else:
            rows = held_out_rows(model.trained, report=tell)
        metrics = measure(model, rows)
    width = max(_LABEL_WIDTH, *(len(name) + 1 for name in metrics))  # names have their task in front
    print_line(f"{'checkpoint':<{width}}{model.trained.origin}")
    for name, value in metrics.items():
        number = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        print_line(f"{name.replace('_', ' '):<{width}}{number}")
    for line in _row_notes(rows.report):
        print_line(line)


def measure(model: TrainedModule, rows: Rows) -> dict[str, float]:
    """Return the metrics of a model on rows with labels."""
    config = model.trained.config
    predictions = Predictions.concatenate([model.predict(block.batch) for block in rows.blocks()])
    return predictions.metrics(config.all_tasks, is_weighted=config.data.weighted_metrics)


def predict(
    folder: StoragePath,
    inputs: Sequence[str],
    output: StoragePath,
    keep: Sequence[str] = (),
    trust_code: bool = False,
) -> None:
    """Write the predictions for each valid row, after the number of the row in the input.

    Rows are read, predicted and written block by block, so any number of them needs the memory of a block.

    Args:
        inputs: files with or without labels, or "-" for standard input; none for the test rows of the run.
        output: a CSV or Parquet file, local or in a store, or standard output.
        keep: columns of the input to write as well.

    Raises:
        ConfigError: the input has no such columns.
        DataError: the input cannot be read, or has no valid row, or too many invalid ones.
        HybridError: the output exists or cannot be written.
    """
    check_new(output)
    model = _read_model(folder, trust_code, uses_paths=not inputs)
    tasks = model.trained.config.all_tasks
    for index, name in enumerate(keep):
        if name in (ROW, *column_names(tasks)):
            raise ConfigError(_KEEP, "is the name of another column of the output", name)
        if name in keep[:index]:
            raise ConfigError(_KEEP, "names a column twice", name)
    passthrough = [(_KEEP, name) for name in keep]
    # No progress while rows go to standard output or come from standard input.
    is_quiet = output == STDOUT or _STREAM in inputs
    with nullcontext(lambda text: None) if is_quiet else passing_status() as report_progress:
        if not inputs:
            rows = held_out_rows(model.trained, passthrough=passthrough, report=report_progress)
        elif list(inputs) == [_STREAM]:
            rows = _standard_input(model.trained, passthrough, at_once=output == STDOUT)
        else:
            rows = file_rows(
                model.trained, inputs, with_labels=False, passthrough=passthrough, report=report_progress
            )
        with prediction_file(output) as file:
            for block in rows.blocks():
                columns = prediction_columns(tasks, model.predict(block.batch).tied().outputs)
                predicted = {name: pa.array(values.numpy()) for name, values in columns.items()}
                file.write({ROW: pa.array(block.source_rows_B), **block.passthrough, **predicted})
    where = "standard output" if output == STDOUT else str(output)
    report = rows.report
    wrote = f"wrote {report.num_rows:,} predictions to {where}; checkpoint: {model.trained.origin}"
    for line in (wrote, *_row_notes(report)):
        print_line(line, to_stderr=output == STDOUT)


def _standard_input(trained: TrainedRun, passthrough: Sequence[tuple[str, str]], *, at_once: bool) -> Rows:
    """Return the rows of standard input; ``at_once``: each as it arrives, since somebody may wait for it."""
    descriptor = 0
    text = read_descriptor(descriptor, BLOCK_BYTES, at_once=at_once)
    rows, layout = stream_rows(trained, STDIN, text, passthrough)
    if os.isatty(descriptor):
        names = ", ".join(layout.required)
        header = "" if layout.data.columns else ", after a line with their names"
        print_line(f"waiting for rows with {names}{header}; Ctrl-D ends them", to_stderr=True)
    return rows


def check_new(output: StoragePath) -> None:
    """Raise HybridError if the output exists, or its store refuses."""
    if output != STDOUT and storage.exists(output):
        raise HybridError(f"{output}: exists already; choose another --output, or remove it")


def warn(line: str) -> None:
    """Print a warning about a checkpoint."""
    print_line(line, to_stderr=True)


def _read_model(folder: StoragePath, trust_code: bool, *, uses_paths: bool) -> TrainedModule:
    """Read the best checkpoint of a run, or a given one; the tables stay in their files."""
    with passing_status() as tell:
        tell("reading the model")
        trained = TrainedRun.read(folder, warn, trust_code, uses_paths=uses_paths)
        return TrainedModule(trained, in_memory=False)


def _row_notes(report: DatasetReport) -> Iterator[str]:
    if report.unknown:
        yield f"{'unknown values':<{_LABEL_WIDTH}}{unknown_fractions(report.unknown)}"
    yield from data_notes(report)
