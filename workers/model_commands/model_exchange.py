"""``hybrid export`` and ``hybrid import``: models for other programs, and tables from them."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.checkpoint.checkpoint_manifest import MANIFEST_FILE, write_errors
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config.loading import CONFIG_FILE
from hybrid.errors import HybridError
from hybrid.export import program_export
from hybrid.export.name_map import NameMap
from hybrid.export.table_import import check_fit, stored_tensors, write_imported
from hybrid.inference.raw_rows import held_out_rows
from hybrid.inference.trained_module import TrainedModule
from hybrid.inference.trained_run import TrainedRun
from hybrid.storage import files as storage
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import RemotePath, StoragePath
from workers.console.messages import print_line
from workers.console.terminal import passing_status
from workers.model_commands.prediction_commands import check_new, measure, warn


def export_run(
    folder: StoragePath,
    output: StoragePath,
    formats: Sequence[str],
    dtype: str | None,
    names: NameMap,
    trust_code: bool = False,
) -> None:
    """Write a trained model into a new folder, local or in a store, and print what was written.

    Args:
        folder: a run, of which the best checkpoint is used, or a checkpoint.
        formats: of "program", "onnx" and "tables".
        dtype: data type of the tables, None for that of the run. If it is narrower, the loss of precision is
            measured and printed.
        names: the names of the tables in the file of tables.

    Raises:
        HybridError: the output exists or cannot be written, or packages are missing.
    """
    check_new(output)
    if "onnx" in formats:
        program_export.check_onnx()
    with passing_status() as tell:
        tell("reading the model")
        # Measuring the loss of precision reads the data of the run.
        trained = TrainedRun.read(folder, warn, trust_code, uses_paths=dtype is not None)
        model = TrainedModule(trained)
    new_names = names.rename_tables(model.table_names)
    lines = [f"{'checkpoint':<20}{trained.origin}"]
    if dtype is not None and getattr(torch, dtype).itemsize < model.dtype.itemsize:
        lines += _narrow(model, dtype)
    with _new_folder(output) as partial, passing_status() as tell:
        files = program_export.write_preprocessing(model, partial)
        if "tables" in formats:
            tensors = {new_names[table]: model.rows(table).detach() for table in model.table_names}
            files += write_tensors(partial, program_export.TABLES_FILE, tensors)
        if {"program", "onnx"} & {*formats}:
            tell("exporting the program")
            program = program_export.export_program(model)
            if "program" in formats:
                torch.export.save(program, partial / program_export.PROGRAM_FILE)
                files.append(program_export.PROGRAM_FILE)
            if "onnx" in formats:
                files += program_export.write_onnx(program, model, partial)
    lines += [f"{'wrote':<20}{output / name}" for name in files]
    for line in lines:
        print_line(line)


def _narrow(model: TrainedModule, dtype: str) -> list[str]:
    """Convert the tables to a narrower data type; return lines that report what it costs."""
    full = {name: model.rows(name).detach() for name in model.table_names}
    before: dict[str, float] = {}
    notes = []
    try:
        rows = held_out_rows(model.trained, report=lambda text: None)
        before = measure(model, rows)
    except HybridError as error:
        notes = [f"{'on test rows':<20}not measured: {error}"]
    for index, name in enumerate(model.table_names):
        model.tables[index] = nn.Embedding.from_pretrained(
            model.rows(name).detach().to(getattr(torch, dtype))
        )
    if before:
        after = measure(model, rows)
        notes = [
            f"{name.replace('_', ' ') + ' ':<20}{value:.6f} before, {after[name]:.6f} after"
            for name, value in before.items()
            if name.rpartition(".")[2] not in ("base_rate", "num_samples")
        ]
    changes = [(rows_RD - model.rows(name)).abs().max().item() for name, rows_RD in full.items()]
    sizes = [sum(each.nbytes for each in tables) / 2**20 for tables in (map(model.rows, full), full.values())]
    return [
        f"{'tables':<20}{dtype}, {sizes[0]:,.2f} MiB of {sizes[1]:,.2f}",
        f"{'largest change':<20}{max(changes):.2g} of a value of a row",
        *notes,
    ]


@contextmanager
def _new_folder(output: StoragePath) -> Iterator[Path]:
    """Create a folder atomically: write into the yielded folder, which becomes ``output`` at the end."""
    is_remote = isinstance(output, RemotePath)
    try:
        parent = None if is_remote else Path(str(output)).parent
        with tempfile.TemporaryDirectory(prefix=".hybrid-", dir=parent) as scratch:
            folder = Path(scratch, "export")
            make_folder(folder)
            yield folder
            if not is_remote:
                folder.rename(str(output))
                return
            # The file that the others need comes last.
            paths = sorted(folder.iterdir(), key=lambda path: path.name == program_export.PREPROCESSING_FILE)
            try:
                for path in paths:
                    storage.copy(path, output / path.name)
            except BaseException:
                with suppress(OSError):
                    storage.remove(output)
                raise
    except OSError as error:
        raise HybridError(f"{output}: cannot be written: {error.strerror or error}") from error


def import_tables(source: StoragePath, base: StoragePath, output: StoragePath, names: NameMap) -> None:
    """Write a copy of a run or checkpoint in which some tables have the rows of a file.

    Args:
        source: a state dict of ``torch.save``, or safetensors.
        base: a run, of which the newest checkpoint is copied, or a checkpoint.
        output: of the same kind as ``base``; must not exist.
        names: which tensor is which table.

    Raises:
        ConfigError: a name matches nothing.
        DataError: the file cannot be read, or a tensor does not fit its table.
        CheckpointError: ``base`` has no checkpoint, or the output cannot be written.
    """
    check_new(output)
    stored = Checkpoint.newest_valid(base, warn)
    is_run = not storage.exists(base / MANIFEST_FILE)
    with stored_tensors(source) as tensors:
        sources = names.match_tables(tensors, stored.manifest.tables, str(source))
        check_fit(stored, tensors, sources)
        folder = step_folder(output, stored.manifest.step) if is_run else output
        try:
            write_imported(stored, tensors, sources, folder)
            if is_run:
                config = base / CONFIG_FILE
                if not storage.exists(config):
                    config = stored.parts / CONFIG_FILE
                with write_errors(output):
                    storage.write_bytes(output / CONFIG_FILE, storage.read_bytes(config))
        except BaseException:
            with suppress(OSError):
                # A store may keep a folder whose last file was removed.
                if not storage.list_entries(output, is_deep=True):
                    storage.remove(output)
            raise
    for table, name in sources.items():
        rows, dim, _ = stored.manifest.tables[table]
        print_line(f"{'table':<20}{table}: {rows:,} x {dim}, {name} of {source}")
    print_line(f"{'wrote':<20}{folder}, with everything else from {stored.folder}")
