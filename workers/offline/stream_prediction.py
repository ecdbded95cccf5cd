"""Predictions of rows that come by standard input, block by block, to their end."""

import os
import sys
from collections.abc import Sequence

import pyarrow as pa
import torch

from hybrid.batch import Batch
from hybrid.data.dataset.batch_tensors import unlabelled_batch
from hybrid.data.dataset.dataset_manifest import DatasetReport
from hybrid.data.encode.unknown_values import UnknownCounter
from hybrid.data.parse.byte_stream import STDIN, chunks
from hybrid.data.parse.sources import Source
from hybrid.data.parse.text_lines import BLOCK_BYTES
from hybrid.data.prepare.new_rows import section_for
from hybrid.errors import ConfigError, DataError
from hybrid.inference.model_outputs import prediction_columns
from hybrid.inference.trained_run import Trained
from hybrid.metrics import Predictions
from hybrid.storage.remote_path import Place
from workers.console.escaping import visible
from workers.offline.batch_prediction import (
    TrainedModel,
    check_kept,
    check_new,
    read_model,
    say_of_predictions,
)
from workers.offline.passthrough_columns import OPTION
from workers.offline.prediction_file import ROW, STDOUT, prediction_file

_DESCRIPTOR = 0


def predict_stream(folder: Place, output: Place, keep: Sequence[str] = (), trust_code: bool = False) -> None:
    """Write what is predicted of each usable row of standard input, after its number, as it comes.

    What is in memory is a block of rows. To standard output, a block is what there is; equal rows of two
    blocks may have other last bits.

    Args:
        output: a CSV or Parquet, which is there at the end; or standard output.
        keep: columns of the input to write beside them.

    Raises:
        ConfigError: the input lacks a column, or rows of the model are no text.
        DataError: it holds no usable row, or too many that are not.
        HybridError: the output exists, or cannot be written.
    """
    check_new(output)
    model = read_model(folder, trust_code)
    check_kept(model, keep)
    source = _source(model.trained, keep, at_once=output == STDOUT)
    _say_what_is_awaited(source)
    log, unknown, num_rows = source.new_log(), UnknownCounter(model.trained.encoder), 0
    with prediction_file(output) as file:
        for block in source.blocks(log):
            encoded = model.trained.encoder.encode(block)
            unknown.add(block, encoded)
            outputs = _outputs(model, unlabelled_batch(encoded, model.trained.encoder.input_spec))
            found = prediction_columns(model.trained.config.all_tasks, outputs)
            predicted = {name: pa.array(values.numpy()) for name, values in found.items()}
            file.write({ROW: pa.array(block.source_rows_B), **block.beside, **predicted})
            num_rows += len(block.source_rows_B)
        if not num_rows:
            raise DataError(f"{STDIN}: no rows")
        report = DatasetReport(num_rows, (), log.finish(), unknown.report())
    say_of_predictions(model, output, report)


def _source(trained: Trained, keep: Sequence[str], at_once: bool) -> Source:
    config = trained.config
    data = section_for(config, (STDIN,), trained.encoder.input_spec)
    if data.format == "parquet":
        rule = "must name files where data.format is parquet: such a file is read from its end"
        raise ConfigError("--input", rule, "-")
    return Source(
        (STDIN,),
        data,
        with_labels=False,
        tasks=config.tasks,
        columns=config.columns,
        text=chunks(_DESCRIPTOR, BLOCK_BYTES, at_once=at_once),
        beside=tuple((OPTION, name) for name in keep),
    )


def _outputs(model: TrainedModel, batch: Batch) -> torch.Tensor:
    """Those of the dense net, the same for equal samples."""
    size = model.trained.config.train.batch_size
    parts = batch.split(-(-len(batch.labels) // size))
    outputs_BO = torch.cat([model.outputs(part) for part in parts])
    keys = batch.row_keys(model.trained.blueprint.sequences)
    return Predictions(outputs_BO, batch.labels, keys).tied().outputs


def _say_what_is_awaited(source: Source) -> None:
    if os.isatty(_DESCRIPTOR):
        layout = source.layout
        names = ", ".join(layout.wanted)
        form = "" if layout.data.columns else ", after a line with their names"
        print(visible(f"waiting for rows with {names}{form}; Ctrl-D ends them"), file=sys.stderr)
