"""Tables of other programs: reading their files, and a checkpoint with their rows.

State dicts of ``torch.save`` and safetensors are memory-mapped and read block by block. Only tensors and
plain containers are unpickled (``weights_only``).
"""

import dataclasses
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_manifest import (
    BEST,
    OWES_EVALUATION,
    Files,
    is_pre_update_file,
    shard_file,
    write_errors,
)
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import map_arrays
from hybrid.data.encode.feature_encoder import FILE_NAME, vocabularies_path
from hybrid.data.encode.vocabulary import VOCABULARIES_FILE
from hybrid.embedding.pretrained_by_position import StoredTensor
from hybrid.errors import DataError, StorageError, first_line
from hybrid.storage.files import compute_checksum, copy, exists, local_copy
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import RemotePath, StoragePath

_WEIGHT = "weight"


def check_fit(stored: Checkpoint, tensors: Mapping[str, StoredTensor], sources: Mapping[str, str]) -> None:
    """Raise DataError if the shape or data type of a tensor does not fit its table.

    Args:
        sources: the name of the tensor of each table.
    """
    for table, name in sources.items():
        num_rows, dim, _ = stored.manifest.tables[table]
        tensor = tensors[name]
        if tensor.shape != (num_rows, dim):
            shape = " x ".join(map(str, tensor.shape)) or "one value"
            expected = f"table {table!r} of {stored.folder} is {num_rows} x {dim}"
            raise DataError(f"{name!r} is {shape}, but {expected}")
        if not (dtype := tensor.rows(0, 1).dtype).is_floating_point:
            raise DataError(f"{name!r} has type {dtype}, but table {table!r} needs floating-point values")


def write_imported(
    stored: Checkpoint, tensors: Mapping[str, StoredTensor], sources: Mapping[str, str], folder: StoragePath
) -> None:
    """Write a copy of a checkpoint in which some tables have other rows.

    The optimizer state of these tables is reset to zeros, as at the start of a run. The metrics of the model
    are dropped; a run that keeps its best checkpoint evaluates the model first.

    Args:
        sources: the name of the tensor of each table; see :func:`check_fit`.
        folder: the new checkpoint; must not exist.

    Raises:
        CheckpointError: the folder exists or cannot be written. Nothing is left behind.
    """
    partial = checkpoint_folders.begin(folder)
    manifest = stored.manifest
    is_remote = isinstance(partial, RemotePath)
    try:
        # Shards are memory-mapped for writing, so files of a store are written locally and copied.
        scratch = tempfile.TemporaryDirectory(prefix="hybrid-") if is_remote else nullcontext(str(partial))
        with scratch as local:
            files = _copy_files(stored, Path(local))
            for table, name in sources.items():
                count = manifest.tables[table][2]
                for index in range(count):
                    shard = shard_file(table, index, count)
                    files[shard] = _replace_rows(Path(local, shard), tensors[name], index, count)
            if is_remote:
                with write_errors(partial):
                    for file in files:
                        copy(Path(local, file), partial / file)
        progress = {name: value for name, value in manifest.progress.items() if name != BEST}
        if manifest.best is not None:
            progress[OWES_EVALUATION] = True  # patience counts from this evaluation
        new = dataclasses.replace(manifest, files=files, metrics={}, progress=progress, parts="")
        checkpoint_folders.commit(partial, new)
    except BaseException:
        checkpoint_folders.discard(partial)
        raise


def _copy_files(stored: Checkpoint, folder: Path) -> Files:
    """Copy the files of a checkpoint and its shared vocabularies; return their sizes and checksums.

    Pre-update rows are left out, because they belong to the rows that are replaced.
    """
    files = {name: entry for name, entry in stored.manifest.files.items() if not is_pre_update_file(name)}
    with write_errors(folder):
        for name in files:
            make_folder((folder / name).parent)
            with stored.local_file(name) as source:
                shutil.copyfile(source, folder / name)
    shared = vocabularies_path(stored.parts) if exists(stored.parts / FILE_NAME) else None
    if shared is not None:
        path = folder / VOCABULARIES_FILE
        with write_errors(path), local_copy(shared) as source:
            shutil.copyfile(source, path)
            files[VOCABULARIES_FILE] = (path.stat().st_size, compute_checksum(path))
    return files


def _replace_rows(path: Path, tensor: StoredTensor, index: int, count: int) -> tuple[int, str]:
    """Write every ``count``-th row of a tensor, from ``index``, into a shard; return size and checksum."""
    with write_errors(path):
        arrays = map_arrays(path, is_writable=True)
        for kind, array in arrays.items():
            if kind != _WEIGHT:
                array[:] = 0
        for start, block_RD in tensor.of_shard(index, count):
            arrays[_WEIGHT][start : start + len(block_RD)] = block_RD.double().numpy()
        del arrays
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def stored_tensors(path: StoragePath) -> Iterator[dict[str, StoredTensor]]:
    """Open a file; yield its tensors by name. The keys of nested dicts are joined by dots.

    Raises:
        DataError: the file cannot be read, or holds other objects than tensors.
        StorageError: the store refuses.
    """
    try:
        with local_copy(path) as local_path:
            if path.suffix == ".safetensors":
                with safe_open(local_path, framework="pt") as file:
                    yield {name: StoredTensor.of_safetensors(file, name) for name in file.keys()}  # noqa: SIM118
            else:
                # torch maps files that are given by path only.
                state = torch.load(str(local_path), map_location="cpu", mmap=True, weights_only=True)
                yield {name: _of_torch(tensor) for name, tensor in _flatten("", state)}
    except StorageError:
        raise
    except pickle.UnpicklingError as error:
        rule = "save a state_dict() of plain tensors, by torch.save or as safetensors"
        raise DataError(f"{path}: holds more than tensors, which is not unpickled; {rule}") from error
    except (OSError, SafetensorError, RuntimeError, ValueError, LookupError) as error:
        raise DataError(
            f"{path}: cannot be read as a state dict or safetensors: {first_line(error)}"
        ) from error


def _of_torch(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tuple(tensor.shape), lambda start, stop: tensor[start:stop])


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts; skip other values, such as the number of an epoch."""
    if isinstance(value, Tensor):
        yield prefix, value.detach()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), inner)
