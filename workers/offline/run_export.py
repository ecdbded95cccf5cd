"""``hybrid export``: a trained model as files that need nothing of this project."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from hybrid.custom_loop.prepared_batches import features_of
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.errors import HybridError
from hybrid.export import program_export
from hybrid.export.name_map import NameMap
from hybrid.export.table_export import StoredRows
from hybrid.inference.trained_module import TrainedModule
from hybrid.inference.trained_run import Trained
from hybrid.metrics import Predictions
from hybrid.storage import files as storage
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import Place, RemotePath
from workers.console.escaping import visible
from workers.console.terminal import passing_status
from workers.offline.batch_prediction import check_new, test_rows, warn


def export_run(
    folder: Place,
    output: Place,
    formats: Sequence[str],
    kind: str | None,
    names: NameMap,
    trust_code: bool = False,
) -> None:
    """Write a trained model into a new folder, here or in a store, and print what was written.

    Args:
        folder: a run, of whose checkpoints the best is taken; or one of these.
        formats: of "program", "onnx" and "tables".
        kind: data type of the tables, None for that of the run. If it is narrower, the loss is measured and
            printed.
        names: what tables are called in the file of tables.

    Raises:
        HybridError: the output exists, or cannot be written; packages are missing; see :meth:`Trained.read`.
    """
    check_new(output)
    if "onnx" in formats:
        program_export.check_onnx()
    with passing_status() as say:
        say("reading the model")
        trained = Trained.read(folder, warn, trust_code)
        model = TrainedModule(trained)
    called = names.names(model.table_names)
    lines = [f"{'checkpoint':<20}{trained.origin}"]
    stored, measured = _narrowed(model, kind)
    lines += measured
    with _new_folder(output) as partial, passing_status() as say:
        files = program_export.write_preprocessing(model, partial)
        if "tables" in formats:
            files += program_export.write_tables(stored, called, partial)
        if {"program", "onnx"} & {*formats}:
            say("recording the program")
            program = program_export.recorded_program(model)
            files += program_export.write_program(program, partial) if "program" in formats else []
            say("writing")
            files += program_export.write_onnx(program, model, partial) if "onnx" in formats else []
    lines += [f"{'wrote':<20}{output / name}" for name in files]
    for line in lines:
        print(visible(line))


def _narrowed(model: TrainedModule, kind: str | None) -> tuple[dict[str, StoredRows], list[str]]:
    """The tables' rows as they are to be written, and what is to be said of them."""
    whole = [model.rows(name).detach() for name in model.table_names]
    if kind is None or not any(getattr(torch, kind).itemsize < rows.element_size() for rows in whole):
        return program_export.narrow(model, kind), []
    try:
        dataset = test_rows(model.trained)
    except HybridError as error:
        dataset, why = None, str(error)
    before = {} if dataset is None else _metrics(model, dataset)
    stored = program_export.narrow(model, kind)
    after = {} if dataset is None else _metrics(model, dataset)
    num_bytes = sum(each.nbytes for each in whole)
    now = sum(t.nbytes for name, rows in stored.items() for t in rows.tensors(name).values())
    largest = max(rows.largest_change(of) for rows, of in zip(stored.values(), whole, strict=True))
    lines = [
        f"{'tables':<20}{kind}, {now / 2**20:,.2f} MiB of {num_bytes / 2**20:,.2f}",
        f"{'largest change':<20}{largest:.2g} of a value of a row",
        *(
            f"{name.replace('_', ' ') + ' ':<20}{value:.6f} with the rows as they were, {after[name]:.6f} now"
            for name, value in before.items()
        ),
    ]
    if dataset is None:
        lines.append(f"{'on test rows':<20}not measured: {why}")
    return stored, lines


def _metrics(model: TrainedModule, dataset: PreparedDataset) -> dict[str, float]:
    """How good a model is on some rows; what only the rows decide is left out."""
    spec, sequences, parts = dataset.input_spec, model.trained.blueprint.sequences, []
    loader = BatchLoader(dataset, batch_size=model.trained.config.train.batch_size)
    with torch.no_grad(), loader.batches(0) as batches:
        for batch in batches:
            parts.append(Predictions.of(batch, model.outputs(features_of(batch, spec)), sequences))
    config = model.trained.config
    is_weighted = config.data.weighted_metrics
    found = Predictions.concatenate(parts).metrics(config.all_tasks, is_weighted=is_weighted)
    of_rows = ("base_rate", "num_samples")
    return {name: value for name, value in found.items() if name.rpartition(".")[2] not in of_rows}


@contextmanager
def _new_folder(output: Place) -> Iterator[Path]:
    """A folder to write into, which is ``output`` once everything is in it, and else nothing of it."""
    try:
        with _sent(output) if isinstance(output, RemotePath) else _renamed(output) as folder:
            yield folder
    except OSError as error:
        raise HybridError(f"{output}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _renamed(output: Path) -> Iterator[Path]:
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial)
        yield partial
        os.rename(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _sent(output: RemotePath) -> Iterator[Path]:
    """What is written here is sent to a store, and last the file without which the others are no use."""
    with tempfile.TemporaryDirectory(prefix="hybrid-") as folder:
        yield Path(folder)
        try:
            written = Path(folder).iterdir()
            for path in sorted(written, key=lambda path: path.name == program_export.PREPROCESSING_FILE):
                storage.copy(path, output / path.name)
        except BaseException:
            with suppress(OSError):
                storage.remove(output)
            raise
