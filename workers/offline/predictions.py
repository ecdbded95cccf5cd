"""Using a trained model in one process, without a cluster: evaluate and predict."""

import csv
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from hybrid.checkpoint.dense_state import load_state, unpack_dense
from hybrid.checkpoint.files import DENSE_FILE, REMOTE_FILE
from hybrid.checkpoint.reader import Checkpoint
from hybrid.clock import StepClock
from hybrid.config import RunConfig, TaskSection
from hybrid.config.file import CONFIG_FILE
from hybrid.config.tasks import metric_name
from hybrid.data import manifest
from hybrid.data.encode import FeatureEncoder
from hybrid.data.loader import BatchLoader
from hybrid.data.manifest import DataManifest
from hybrid.data.prepared import cache_folder, encode_files, prepare
from hybrid.data.storage import PreparedDataset
from hybrid.dense.configured import extra_columns
from hybrid.embedding.placement import place
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.stored import StoredTables
from hybrid.errors import ConfigError, HybridError
from hybrid.metrics import Predictions, predicted
from hybrid.own_code.signature import load_run_config
from hybrid.private_files import open_file
from hybrid.steps.ticket import Purpose, Ticket
from hybrid.training.build import Blueprint
from hybrid.training.model import HybridModel
from hybrid.training.step import predict_step
from hybrid.training.tables import table_specs
from workers.screen.data_notes import data_notes, unknown_shares
from workers.screen.terminal import passing_status
from workers.screen.visible import visible


class TrainedModel:
    """A model out of a checkpoint, in this process; the rows of its tables stay in their files.

    Args:
        folder: a run folder, of whose checkpoints the best is taken; or one of these.
        trust_code: whether code that it names may be run though the user has not signed it.

    Attributes:
        origin: the checkpoint that it is out of, and what that is among those of its run, in words.

    Raises:
        CheckpointError: there is no checkpoint, or it is broken.
        ConfigError: it names code that may not be run.
    """

    def __init__(self, folder: Path, trust_code: bool = False) -> None:
        stored = Checkpoint.best_good(folder, lambda line: print(visible(line), file=sys.stderr))
        self.step = stored.manifest.step
        self.folder = stored.folder
        self.origin = f"{stored.folder}, {stored.standing}" if stored.standing else str(stored.folder)
        self.config = load_run_config(stored.folder / CONFIG_FILE, trust_code=trust_code)
        self.encoder = FeatureEncoder.load(stored.folder)
        self._embeddings, self._model = _assemble(self.config, self.encoder, stored)

    def predictions(self, dataset: PreparedDataset) -> Predictions:
        """Those of all samples of ``dataset``, in its order."""
        parts = []
        clock = StepClock()
        ticket = Ticket(0, self.step, self.step, purpose=Purpose.PREDICT)
        loader = BatchLoader(dataset, batch_size=self.config.train.batch_size)
        with passing_status() as say, loader.batches(0) as batches:
            say("predicting")
            for batch in batches:
                outputs_BO = predict_step(self._model, self._embeddings, batch, ticket, clock)
                parts.append(Predictions.of(batch, outputs_BO))
        return Predictions.concatenate(parts)


def _assemble(
    config: RunConfig, encoder: FeatureEncoder, stored: Checkpoint
) -> tuple[Embeddings, HybridModel]:
    spec = encoder.input_spec
    tables = table_specs(config, spec, extra_columns(config.dense.net))
    # Everything lies on the one worker that this process is.
    tables = tuple(dataclasses.replace(t, placement="table", workers=()) for t in tables)
    placement = place(tables, num_workers=1)
    blueprint = Blueprint(config, spec, tables)
    embeddings = Embeddings(tables, spec, placement, {0: StoredTables(placement, stored, blueprint.dtype)})
    net = blueprint.dense_net()
    load_state(net, unpack_dense(stored.tensors(DENSE_FILE))[0], stored.folder)
    if (remote_net := blueprint.remote_net()) is None:
        return embeddings, blueprint.model(net, None).eval()
    load_state(remote_net, unpack_dense(stored.tensors(REMOTE_FILE))[0], stored.folder)
    remote_net.eval()
    return embeddings, blueprint.model(net, lambda ticket, hidden_BH: remote_net(hidden_BH)).eval()


def evaluate(folder: Path, inputs: Sequence[str], trust_code: bool = False) -> None:
    """Print the metrics of a trained model on labelled files, or on the test rows of its run."""
    trained = _read(folder, trust_code)
    with _dataset(trained, inputs, with_labels=True) as dataset:
        metrics = trained.predictions(dataset).metrics(trained.config.all_tasks)
        _say(f"{'checkpoint':<20}{trained.origin}")
        for name, value in metrics.items():
            number = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            _say(f"{name.replace('_', ' ') + ' ':<20}{number}")
        _say_of_rows(dataset)


def predict(folder: Path, inputs: Sequence[str], output: Path, trust_code: bool = False) -> None:
    """Write what is predicted of each usable row to a CSV: its row number in the input, then the values.

    Args:
        inputs: files, with labels or without; none for the test rows of the run.

    Raises:
        HybridError: the output exists, or cannot be written.
    """
    if output.exists():
        raise HybridError(f"{output}: exists already; choose another --output, or remove it")
    trained = _read(folder, trust_code)
    with _dataset(trained, inputs, with_labels=False) as dataset:
        _write(output, dataset, prediction_columns(trained.config.all_tasks, trained.predictions(dataset)))
        _say(f"wrote {dataset.num_samples:,} predictions to {output}; checkpoint: {trained.origin}")
        _say_of_rows(dataset)


def _read(folder: Path, trust_code: bool) -> TrainedModel:
    with passing_status() as say:
        say("reading the model")
        return TrainedModel(folder, trust_code)


@contextmanager
def _dataset(trained: TrainedModel, inputs: Sequence[str], with_labels: bool) -> Iterator[PreparedDataset]:
    """Files encoded as the model's training files were, or the test rows of its run."""
    if not inputs:
        yield _test_rows(trained)
        return
    with tempfile.TemporaryDirectory(prefix="hybrid-") as scratch:
        folder = Path(scratch) / "encoded"
        with passing_status() as say:
            say("reading the input")
            dataset = encode_files(
                trained.config, inputs, trained.encoder, folder, with_labels=with_labels, tell=say
            )
        yield dataset


def _test_rows(trained: TrainedModel) -> PreparedDataset:
    config, copy = trained.config, trained.folder / manifest.COPY_NAME
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


def prediction_columns(tasks: Mapping[str, TaskSection], predictions: Predictions) -> dict[str, Tensor]:
    """What is predicted, equal samples alike: ``probability``, of each class one, or ``value``, by task."""
    columns = {}
    for name, outputs_N in predictions.tied().of_tasks(tasks).items():
        task, predicted_N = tasks[name], predicted(tasks[name], outputs_N)
        if task.kind == "classes":
            for number, one_N in enumerate(predicted_N.unbind(1)):
                columns[metric_name(tasks, name, f"probability.{number}")] = one_N
        else:
            what = "probability" if task.kind == "binary" else "value"
            columns[metric_name(tasks, name, what)] = predicted_N
    return columns


def _write(output: Path, dataset: PreparedDataset, columns: Mapping[str, Tensor]) -> None:
    partial = output.with_name(f".{output.name}.partial")
    try:
        with open(partial, "w", newline="", opener=open_file) as file:
            writer = csv.writer(file)
            writer.writerow(["row", *columns])
            values = (column_N.tolist() for column_N in columns.values())
            writer.writerows(zip(dataset.source_rows.tolist(), *values, strict=True))
        partial.rename(output)
    except OSError as error:
        raise HybridError(f"{output}: cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
