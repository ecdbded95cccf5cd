"""``hybrid import``: tables of another program in a copy of a run, or of a checkpoint."""

from contextlib import suppress

from hybrid.checkpoint.checkpoint_files import MANIFEST_FILE, write_errors
from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config.loading import CONFIG_FILE
from hybrid.export.name_map import NameMap
from hybrid.export.state_dicts import stored_tensors
from hybrid.export.table_import import check_fit, write_imported
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath
from workers.console.messages import print_line
from workers.model_commands.prediction_commands import check_new, warn


def import_tables(source: StoragePath, base: StoragePath, output: StoragePath, names: NameMap) -> None:
    """Write a run, or a checkpoint, like another one, with the rows of some tables from a file.

    Args:
        source: a state dict of ``torch.save``, or safetensors; of a store, it is fetched.
        base: a run, of whose checkpoints the newest is taken; or one of these.
        output: of the same kind as ``base``; must not exist.
        names: which tensor is which table.

    Raises:
        ConfigError: a name fits nothing.
        DataError: the file cannot be read, or a tensor does not fit its table.
        CheckpointError: ``base`` holds no checkpoint, or the output cannot be written.
    """
    check_new(output)
    stored = Checkpoint.newest_valid(base, warn)
    is_run = not storage.exists(base / MANIFEST_FILE)
    with stored_tensors(source) as tensors:
        sources = names.sources(tensors, stored.manifest.tables, str(source))
        check_fit(stored, tensors, sources)
        folder = step_folder(output, stored.manifest.step) if is_run else output
        try:
            write_imported(stored, tensors, sources, folder)
            if is_run:
                _write_config(stored, base, output)
        except BaseException:
            with suppress(OSError):
                _remove_empty(output)
            raise
    for table, name in sources.items():
        rows, dim, _ = stored.manifest.tables[table]
        print_line(f"{'table':<20}{table}: {rows:,} x {dim}, {name} of {source}")
    print_line(f"{'wrote':<20}{folder}, all else as in {stored.folder}")


def _remove_empty(folder: StoragePath) -> None:
    """Remove a folder without files; a store makes one where its last file is removed."""
    if not storage.list_entries(folder, is_deep=True):
        storage.remove(folder)


def _write_config(stored: Checkpoint, base: StoragePath, output: StoragePath) -> None:
    """Write the configuration of a copy of a run, without which nobody goes on with it."""
    config = base / CONFIG_FILE
    with write_errors(output):
        text = storage.read_bytes(config if storage.exists(config) else stored.parts / CONFIG_FILE)
        storage.write_bytes(output / CONFIG_FILE, text)
