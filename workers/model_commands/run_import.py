"""``hybrid import``: tables of another program in a copy of a run or checkpoint."""

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
