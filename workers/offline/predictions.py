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
from hybrid.clock import StepClock
from hybrid.data import manifest
from hybrid.data.inputs import list_files
from hybrid.data.loader import BatchLoader
from hybrid.data.manifest import DataManifest
from hybrid.data.prepared import cache_folder, encode_files, prepare, section_for
from hybrid.data.storage import PreparedDataset
from hybrid.embedding.placement import place
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.stored import StoredTables
from hybrid.errors import ConfigError, HybridError
from hybrid.metrics import Predictions
from hybrid.serving.predictions import column_names, prediction_columns
from hybrid.serving.trained import Trained
from hybrid.steps.ticket import Purpose, Ticket
from hybrid.training.model import HybridModel
from hybrid.training.step import predict_step
from workers.offline.kept_columns import OPTION, KeptColumns, check_names
from workers.offline.prediction_file import ROW, prediction_file
from workers.offline.stored_outputs import StoredOutputs
from workers.screen.data_notes import data_notes, unknown_shares
from workers.screen.terminal import passing_status
from workers.screen.visible import visible

_ROWS_AT_ONCE = 1 << 16  # that are written


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

    def batches(self, dataset: PreparedDataset) -> Iterator[tuple[Batch, Tensor]]:
        """All samples of ``dataset`` in its order, and their outputs."""
        clock, step = StepClock(), self.trained.stored.manifest.step
        ticket = Ticket(0, step, step, purpose=Purpose.PREDICT)
        loader = BatchLoader(dataset, batch_size=self.trained.config.train.batch_size)
        with passing_status() as say, loader.batches(0) as batches:
            say("predicting")
            for batch in batches:
                yield batch, predict_step(self._model, self._embeddings, batch, ticket, clock)

    def predictions(self, dataset: PreparedDataset) -> Predictions:
        """Those of all samples of ``dataset``, in its order."""
        return Predictions.concatenate([Predictions.of(*each) for each in self.batches(dataset)])


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


def evaluate(folder: Path, inputs: Sequence[str], trust_code: bool = False) -> None:
    """Print the metrics of a trained model on labelled files, or on the test rows of its run."""
    model = _read(folder, trust_code)
    with _dataset(model.trained, inputs, with_labels=True) as dataset:
        metrics = model.predictions(dataset).metrics(model.trained.config.all_tasks)
        _say(f"{'checkpoint':<20}{model.trained.origin}")
        for name, value in metrics.items():
            number = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            _say(f"{name.replace('_', ' ') + ' ':<20}{number}")
        _say_of_rows(dataset)


def predict(
    folder: Path, inputs: Sequence[str], output: Path, keep: Sequence[str] = (), trust_code: bool = False
) -> None:
    """Write what is predicted of each usable row, after its row number in the input, to a CSV or to Parquet.

    What is in memory is some rows, however many there are.

    Args:
        inputs: files, with labels or without; none for the test rows of the run.
        keep: columns of the input to write beside them.

    Raises:
        ConfigError: the input has no such columns.
        HybridError: the output exists, or cannot be written.
    """
    check_new(output)
    model = _read(folder, trust_code)
    tasks = model.trained.config.all_tasks
    check_names(keep, (ROW, *column_names(tasks)))
    kept = _kept_columns(model.trained, inputs, keep) if keep else None
    with _dataset(model.trained, inputs, with_labels=False) as dataset, _scratch() as scratch:
        num_outputs = model.trained.config.num_outputs
        stored = StoredOutputs(scratch, dataset.num_samples, num_outputs, model.dtype)
        for batch, outputs_BO in model.batches(dataset):
            stored.append(outputs_BO, batch.row_keys())
        stored.tie()
        with prediction_file(output) as file:
            start = 0
            for num_rows, beside in _beside(dataset, kept):
                stop = start + num_rows
                found = prediction_columns(tasks, stored.outputs(start, stop))
                predicted = {name: pa.array(values.numpy()) for name, values in found.items()}
                file.write({ROW: pa.array(dataset.source_rows[start:stop]), **beside, **predicted})
                start = stop
        origin = model.trained.origin
        _say(f"wrote {dataset.num_samples:,} predictions to {output}; checkpoint: {origin}")
        _say_of_rows(dataset)


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


def check_new(output: Path) -> None:
    """HybridError where what is to be written is there already."""
    if output.exists():
        raise HybridError(f"{output}: exists already; choose another --output, or remove it")


def warn(line: str) -> None:
    """Tell the user something of a checkpoint."""
    print(visible(line), file=sys.stderr)


def _read(folder: Path, trust_code: bool) -> TrainedModel:
    with passing_status() as say:
        say("reading the model")
        return TrainedModel(Trained.read(folder, warn, trust_code))


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
                tell=say,
            )
        yield dataset


def test_rows(trained: Trained) -> PreparedDataset:
    """The test rows of the run of a model.

    Raises:
        ConfigError: it has none.
        DataError: they are not there any more, or have changed.
    """
    config, copy = trained.config, trained.stored.folder / manifest.COPY_NAME
    if not copy.exists():
        raise ConfigError("--input", "must name files: RUN was trained on batches of your own")
    with passing_status() as say:
        prepared = prepare(config, cache_folder(config), say)
    now = DataManifest.read(prepared / manifest.FILE_NAME)
    DataManifest.read(copy).check_same(now, "name files by --input")
    dataset = PreparedDataset.open(prepared, "test")
    if not dataset.num_samples:
        raise ConfigError("--input", "must name files: RUN has no test rows (data.test_fraction = 0)")
    return dataset


def _say_of_rows(dataset: PreparedDataset) -> None:
    if dataset.report.unknown:
        _say(f"{'unknown values':<20}{unknown_shares(dataset.report.unknown)}")
    for line in data_notes(dataset.report):
        _say(line)


def _say(line: str) -> None:
    print(visible(line))
