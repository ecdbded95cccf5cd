"""Using a trained model in one process, without a cluster: evaluate and predict."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from hybrid.batch import Batch
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DataManifest, DatasetReport
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.parse.input_files import list_files
from hybrid.data.prepare.dataset_location import ensure_prepared, open_split
from hybrid.data.prepare.new_rows import encode_files, section_for
from hybrid.data.prepare.preparation import cache_folder
from hybrid.embedding.placement import place
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.checkpoint_tables import StoredTables
from hybrid.engine.hybrid_model import HybridModel
from hybrid.engine.train_step import predict_step
from hybrid.errors import ConfigError, HybridError
from hybrid.inference.model_outputs import column_names, prediction_columns
from hybrid.inference.trained_run import Trained
from hybrid.metrics import Predictions
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.storage import files as storage
from hybrid.storage.remote_path import Place
from workers.console.data_notes import data_notes, unknown_shares
from workers.console.escaping import visible
from workers.console.terminal import passing_status
from workers.offline.output_file import StoredOutputs
from workers.offline.passthrough_columns import OPTION, KeptColumns, check_names
from workers.offline.prediction_file import ROW, STDOUT, prediction_file

_ROWS_AT_ONCE = 1 << 16  # that are written
_LABEL_WIDTH = 20


class TrainedModel:
    """A model out of a checkpoint, in this process; the rows of its tables stay in their files.

    Attributes:
        trained: what it is read out of.
        dtype: of its outputs.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.dtype = trained.blueprint.dtype
        self._embeddings, self._model = _assemble(trained)
        step = trained.stored.manifest.step
        self._ticket, self._clock = Ticket(0, step, step, purpose=Purpose.PREDICT), StepClock()

    def batches(self, dataset: PreparedDataset) -> Iterator[tuple[Batch, Tensor]]:
        """All samples of ``dataset`` in its order, and their outputs."""
        loader = BatchLoader(dataset, batch_size=self.trained.config.train.batch_size)
        with passing_status() as say, loader.batches(0) as batches:
            say("predicting")
            for batch in batches:
                yield batch, self.outputs(batch)

    def outputs(self, batch: Batch) -> Tensor:
        """Those of the dense net for the samples of a batch."""
        return predict_step(self._model, self._embeddings, batch, self._ticket, self._clock)

    def predictions(self, dataset: PreparedDataset) -> Predictions:
        """Those of all samples of ``dataset``, in its order."""
        sequences = self.trained.blueprint.sequences
        return Predictions.concatenate([Predictions.of(*each, sequences) for each in self.batches(dataset)])


def _assemble(trained: Trained) -> tuple[Embeddings, HybridModel]:
    blueprint = trained.blueprint
    # Everything lies on the one worker that this process is.
    placement = place(blueprint.tables, num_workers=1)
    stored_tables = StoredTables(placement, trained.stored, blueprint.dtype)
    embeddings = Embeddings(blueprint.tables, blueprint.input_spec, placement, {0: stored_tables})
    net, remote_net = trained.nets()
    if remote_net is None:
        return embeddings, blueprint.model(net, None).eval()
    return embeddings, blueprint.model(net, lambda ticket, hidden_BH: remote_net(hidden_BH)).eval()


def evaluate(folder: Place, inputs: Sequence[str], trust_code: bool = False) -> None:
    """Print the metrics of a trained model on labelled files, or on the test rows of its run."""
    model = read_model(folder, trust_code, uses_paths=not inputs)
    with _dataset(model.trained, inputs, with_labels=True) as dataset:
        config = model.trained.config
        is_weighted = config.data.weighted_metrics
        metrics = model.predictions(dataset).metrics(config.all_tasks, is_weighted=is_weighted)
        width = max(_LABEL_WIDTH, *(len(name) + 1 for name in metrics))  # of several tasks, they are long
        _say(f"{'checkpoint':<{width}}{model.trained.origin}")
        for name, value in metrics.items():
            number = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            _say(f"{name.replace('_', ' '):<{width}}{number}")
        for line in _row_notes(dataset.report):
            _say(line)


def predict(
    folder: Place, inputs: Sequence[str], output: Place, keep: Sequence[str] = (), trust_code: bool = False
) -> None:
    """Write what is predicted of each usable row, after its row number in the input.

    What is in memory is some rows, however many there are.

    Args:
        inputs: files, with labels or without; none for the test rows of the run.
        output: a CSV or Parquet, here or in a store, or standard output.
        keep: columns of the input to write beside them.

    Raises:
        ConfigError: the input has no such columns.
        HybridError: the output exists, or cannot be written.
    """
    check_new(output)
    model = read_model(folder, trust_code, uses_paths=not inputs)
    tasks = model.trained.config.all_tasks
    check_kept(model, keep)
    kept = _kept_columns(model.trained, inputs, keep) if keep else None
    with _dataset(model.trained, inputs, with_labels=False) as dataset, _scratch() as scratch:
        num_outputs = model.trained.config.num_outputs
        stored = StoredOutputs(scratch, dataset.num_samples, num_outputs, model.dtype)
        for batch, outputs_BO in model.batches(dataset):
            stored.append(outputs_BO, batch.row_keys(model.trained.blueprint.sequences))
        stored.tie()
        with prediction_file(output) as file:
            start = 0
            for num_rows, beside in _beside(dataset, kept):
                stop = start + num_rows
                found = prediction_columns(tasks, stored.outputs(start, stop))
                predicted = {name: pa.array(values.numpy()) for name, values in found.items()}
                file.write({ROW: pa.array(dataset.source_rows[start:stop]), **beside, **predicted})
                start = stop
        say_of_predictions(model, output, dataset.report)


def check_kept(model: TrainedModel, names: Sequence[str]) -> None:
    """ConfigError where columns of these names cannot stand beside the predictions of a model."""
    check_names(names, (ROW, *column_names(model.trained.config.all_tasks)))


def say_of_predictions(model: TrainedModel, output: Place, report: DatasetReport) -> None:
    """Say what was written, and what to know of its rows; on stderr, where that was standard output."""
    where, file = ("standard output", sys.stderr) if output == STDOUT else (str(output), sys.stdout)
    wrote = f"wrote {report.num_rows:,} predictions to {where}; checkpoint: {model.trained.origin}"
    for line in (wrote, *_row_notes(report)):
        print(visible(line), file=file)


def _beside(dataset: PreparedDataset, kept: KeptColumns | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """How many rows follow, and their columns that are kept."""
    if kept is not None:
        for columns in kept.blocks(dataset.source_rows):
            yield len(next(iter(columns.values()))), columns
        return
    for start in range(0, dataset.num_samples, _ROWS_AT_ONCE):
        yield min(_ROWS_AT_ONCE, dataset.num_samples - start), {}


def _kept_columns(trained: Trained, inputs: Sequence[str], names: Sequence[str]) -> KeptColumns:
    """Columns of the files that are named, or of those with the test rows of the run."""
    config, data = trained.config, trained.config.data
    if inputs:
        files = list_files(inputs, "the paths given")
        data = section_for(config, files, trained.encoder.input_spec)
    elif data.format == "synthetic":
        raise ConfigError(OPTION, "needs --input: the built-in click log is in no files")
    else:
        files = list_files(data.test_path or data.path, "data.test_path")
    kept = KeptColumns.of(files, data, config, names)
    kept.check()
    return kept


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hybrid-") as folder:
        yield Path(folder)


def check_new(output: Place) -> None:
    """HybridError where what is to be written is there already, or its store refuses."""
    if output != STDOUT and storage.exists(output):
        raise HybridError(f"{output}: exists already; choose another --output, or remove it")


def warn(line: str) -> None:
    """Tell the user something of a checkpoint."""
    print(visible(line), file=sys.stderr)


def read_model(folder: Place, trust_code: bool, *, uses_paths: bool = False) -> TrainedModel:
    """The model of a run's best checkpoint, or of one that is named; see :meth:`Trained.read`."""
    with passing_status() as say:
        say("reading the model")
        return TrainedModel(Trained.read(folder, warn, trust_code, uses_paths=uses_paths))


@contextmanager
def _dataset(trained: Trained, inputs: Sequence[str], with_labels: bool) -> Iterator[PreparedDataset]:
    """Files encoded as the model's training files were, or the test rows of its run."""
    if not inputs:
        yield test_rows(trained)
        return
    with _scratch() as scratch:
        with passing_status() as say:
            say("reading the input")
            dataset = encode_files(
                trained.config,
                inputs,
                trained.encoder,
                scratch / "encoded",
                with_labels=with_labels,
                report=say,
            )
        yield dataset


def test_rows(trained: Trained) -> PreparedDataset:
    """The test rows of the run of a model.

    Raises:
        ConfigError: it has none.
        DataError: they are not there any more, or have changed.
    """
    config, copy = trained.config, trained.stored.parts / dataset_manifest.COPY_NAME
    if not storage.exists(copy):
        raise ConfigError("--input", "must name files: RUN was trained on batches of your own")
    rule = "name files by --input"
    trained_on = DataManifest.read(copy, rule)
    with passing_status() as say:
        prepared = ensure_prepared(config, cache_folder(config), say)
    trained_on.check_same(DataManifest.read(prepared / dataset_manifest.FILE_NAME), rule)
    dataset = open_split(prepared, "test", config.data)
    if not dataset.num_samples:
        raise ConfigError("--input", "must name files: RUN has no test rows (data.test_fraction = 0)")
    return dataset


def _row_notes(report: DatasetReport) -> Iterator[str]:
    """What to know of some rows."""
    if report.unknown:
        yield f"{'unknown values':<{_LABEL_WIDTH}}{unknown_shares(report.unknown)}"
    yield from data_notes(report)


def _say(line: str) -> None:
    print(visible(line))
