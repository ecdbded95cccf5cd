"""Tables of another program in a checkpoint: a copy of one, in which they take the place of its own."""

import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_files import Files, is_pre_update_file, shard_file, write_errors
from hybrid.checkpoint.checkpoint_manifest import BEST, OWES_EVALUATION
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import map_arrays
from hybrid.data.encode.feature_encoder import FILE_NAME, vocabularies_place
from hybrid.data.encode.vocabulary_file import VOCABULARIES_FILE
from hybrid.embedding.pretrained_by_position import StoredTensor
from hybrid.errors import DataError
from hybrid.storage.files import compute_checksum, copy, exists, local_copy
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import RemotePath, StoragePath

_WEIGHT = "weight"


def check_fit(stored: Checkpoint, tensors: Mapping[str, StoredTensor], sources: Mapping[str, str]) -> None:
    """See that each tensor can be the rows of its table.

    Args:
        sources: the name of the tensor of each table.

    Raises:
        DataError: one has another shape, or is of integers; names both.
    """
    for table, name in sources.items():
        num_rows, dim, _ = stored.manifest.tables[table]
        tensor = tensors[name]
        if tensor.shape != (num_rows, dim):
            found = " x ".join(map(str, tensor.shape)) or "one value"
            raise DataError(f"{name!r} is {found}, and table {table!r} of {stored.folder} {num_rows} x {dim}")
        if not (kind := tensor.rows(0, 1).dtype).is_floating_point:
            raise DataError(f"{name!r} is of {kind}, and rows of table {table!r} are floating point")


def write_imported(
    stored: Checkpoint, tensors: Mapping[str, StoredTensor], sources: Mapping[str, str], folder: StoragePath
) -> None:
    """Write a checkpoint like ``stored``, with the rows of some tables from elsewhere.

    The state of their optimizers begins anew; every optimizer's begins with zeros. What was measured of the
    model before is left out, and due again where it was.

    Args:
        sources: the name of the tensor of each table; see :func:`check_fit`.
        folder: of the checkpoint; must not exist.

    Raises:
        CheckpointError: it exists, or cannot be written; nothing is left of it.
    """
    partial = checkpoint_folders.begin(folder)
    manifest = stored.manifest
    try:
        with _written_here(partial) as here:
            kept = _copied(stored, here) | _with_vocabularies(stored.parts, here)
            for table, name in sources.items():
                count = manifest.tables[table][2]
                for index in range(count):
                    kept |= _replaced(here, shard_file(table, index, count), tensors[name], index, count)
            if isinstance(partial, RemotePath):
                with write_errors(partial):
                    for name in kept:
                        copy(here / name, partial / name)
        progress = {name: value for name, value in manifest.progress.items() if name != BEST}
        if manifest.best is not None:
            progress[OWES_EVALUATION] = True  # else a run with patience would count from its beginning
        whole = dataclasses.replace(manifest, files=kept, metrics={}, progress=progress, parts="")
        checkpoint_folders.commit(partial, whole)
    except BaseException:
        checkpoint_folders.discard(partial)
        raise


@contextmanager
def _written_here(partial: StoragePath) -> Iterator[Path]:
    """Where the files of a checkpoint are written: where they are to be, or of a store for a while here."""
    if isinstance(partial, RemotePath):
        with tempfile.TemporaryDirectory(prefix="hybrid-") as folder:
            yield Path(folder)
    else:
        yield partial


def _copied(stored: Checkpoint, folder: Path) -> Files:
    """Copy the files of a checkpoint, but rows before the last update, which are none of the new rows."""
    kept = {name: entry for name, entry in stored.manifest.files.items() if not is_pre_update_file(name)}
    with write_errors(folder):
        for name in kept:
            make_folder((folder / name).parent)
            with stored.local_file(name) as here:
                shutil.copyfile(here, folder / name)
    return kept


def _with_vocabularies(parts: StoragePath, partial: Path) -> Files:
    """Copy the vocabularies that a checkpoint shares with others of its run: the new one may be alone."""
    if not exists(parts / FILE_NAME) or (source := vocabularies_place(parts)) is None:
        return {}
    path = partial / VOCABULARIES_FILE
    with write_errors(path), local_copy(source) as here:
        shutil.copyfile(here, path)
        return {VOCABULARIES_FILE: (path.stat().st_size, compute_checksum(path))}


def _replaced(partial: Path, name: str, tensor: StoredTensor, index: int, count: int) -> Files:
    """Write every ``count``-th row of a tensor from ``index`` on into a shard, block by block."""
    path = partial / name
    with write_errors(path):
        arrays = map_arrays(path, is_writable=True)
        for kind, array in arrays.items():
            if kind != _WEIGHT:
                array[:] = 0
        for start, own_RD in tensor.of_shard(index, count):
            arrays[_WEIGHT][start : start + len(own_RD)] = own_RD.double().numpy()
        del arrays
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {name: (path.stat().st_size, digest)}
