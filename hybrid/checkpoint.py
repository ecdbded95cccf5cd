"""A checkpoint: a folder of safetensors and a manifest, there whole or not at all.

::

    step-00000293/
        manifest.json                     what is in here, with sizes; written last
        config.toml                       the effective configuration
        features.json                     how raw values become numbers (see hybrid/data/encode.py)
        dense.safetensors                 trainer 0's net, and its optimizer's state
        remote.safetensors                the remote dense net, where there is one
        tables/C1.0-of-2.safetensors      rows 0, 2, 4, ... of table C1, and their optimizer state

Every role writes its own part into ``step-N.partial``; the manifest and one rename make it a checkpoint.
Rows are keyed by table and row, not by worker: any number of workers loads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hybrid.errors import CheckpointError

FORMAT = 1
CONFIG_FILE = "config.toml"
DENSE_FILE = "dense.safetensors"
REMOTE_FILE = "remote.safetensors"
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps taken.
        epoch: epochs finished.
        tables: table name to [number of rows, dim, number of shards].
        files: every other file of the folder, by relative path, with its size in bytes.
        metrics: the last evaluation's; empty where there was none.
    """

    step: int
    epoch: int
    tables: dict[str, tuple[int, int, int]]
    files: dict[str, int]
    metrics: dict[str, float]
    format: int = FORMAT


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as one file of ``folder`` and see them safely on the disk."""
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
        _sync(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def write_text(folder: Path, name: str, text: str) -> None:
    """Write a text file of ``folder``."""
    try:
        (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / name}: {error.strerror}") from error


def shard_file(table: str, index: int, count: int) -> str:
    """Relative path of the file with one shard of a table."""
    return f"tables/{quote(table, safe='')}.{index}-of-{count}.safetensors"


def begin(folder: Path) -> Path:
    """Make the empty folder into which every role writes its part of checkpoint ``folder``."""
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; it is not overwritten")
    partial = folder.with_name(folder.name + _PARTIAL)
    try:
        if partial.exists():  # left by a run that was killed while writing
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {partial}: {error.strerror}") from error
    return partial


def discard(partial: Path) -> None:
    """Remove what was written of a checkpoint that will not be one."""
    shutil.rmtree(partial, ignore_errors=True)


def commit(partial: Path, manifest: Manifest) -> Path:
    """Seal a folder that every role has written to; its final path.

    Raises:
        CheckpointError: a shard of a table is not there, or the folder cannot be written.
    """
    files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
    for table, (_, _, count) in manifest.tables.items():
        for index in range(count):
            if shard_file(table, index, count) not in files:
                raise CheckpointError(
                    f"{partial}: a worker wrote shard {index} of {count} of table {table} elsewhere; "
                    "run.folder must be storage that all hosts share"
                )
    manifest = dataclasses.replace(manifest, files=files)
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    try:
        (partial / "manifest.json").write_text(json.dumps(dataclasses.asdict(manifest), indent=1))
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        os.rename(partial, final)
        _sync(final.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {final}: {error.strerror}") from error
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checkpoint:
    """A checkpoint on disk, checked when opened and read piece by piece."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open a checkpoint folder, or the newest checkpoint of a run folder.

        Raises:
            CheckpointError: there is none, or a file is missing or has another size than it had.
        """
        if not (folder / "manifest.json").exists():
            found = sorted(folder.glob("checkpoints/step-*[0-9]/manifest.json"))  # none that is partial
            if not found:
                raise CheckpointError(f"{folder}: there is no checkpoint here")
            folder = found[-1].parent
        manifest = _read_manifest(folder / "manifest.json")
        for name, size in manifest.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                raise CheckpointError(f"{path}: missing or altered since the checkpoint was written")
        return cls(folder, manifest)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The named tensors of one file."""
        path = self.folder / name
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error

    def load_rows(self, table: str, index: int, count: int, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of one shard, split in whatever way, from the shards on disk.

        Args:
            into: "weight" and optimizer state, as views of shard ``index`` of ``count``.

        Raises:
            CheckpointError: the table is not there, or has another shape or optimizer.
        """
        if table not in self.manifest.tables:
            raise CheckpointError(f"{self.folder}: holds no table {table}; it is of another model")
        _, _, num_shards = self.manifest.tables[table]
        rows_R = torch.arange(len(into["weight"])) * count + index
        for shard in range(num_shards):
            mine_R = rows_R % num_shards == shard
            if not mine_R.any():
                continue
            source = rows_R[mine_R] // num_shards
            stored = self.tensors(shard_file(table, shard, num_shards))
            widths = {name: tensor.shape[1:] for name, tensor in stored.items()}
            if widths != {name: tensor.shape[1:] for name, tensor in into.items()}:
                raise CheckpointError(f"{self.folder}: table {table} has another shape or optimizer")
            if int(source[-1]) >= len(stored["weight"]):
                raise CheckpointError(f"{self.folder}: table {table} has fewer rows than the model's")
            for name, tensor in into.items():
                tensor[mine_R] = stored[name][source]


def _read_manifest(path: Path) -> Manifest:
    try:
        fields = json.loads(path.read_text())
        if fields.get("format") != FORMAT:
            raise CheckpointError(f"{path}: written by another version (format {fields.get('format')})")
        return Manifest(**fields)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not a manifest: {error}") from error


def pack_dense(net: Mapping[str, Tensor], state: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
    """A net's state dict and its optimizer's ``state`` as one flat dict of tensors."""
    # Clones, since a file holds no two tensors that share memory, as tied weights do.
    packed = {f"net.{name}": tensor.clone() for name, tensor in net.items()}
    for index, values in state.items():
        for key, value in values.items():
            if value is not None:
                packed[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
    return packed


def unpack_dense(packed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """The inverse of :func:`pack_dense`: a net's state dict, and its optimizer's ``state``."""
    net = {name.removeprefix("net."): t for name, t in packed.items() if name.startswith("net.")}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in packed.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    return net, state


def load_state(module: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Load a module's state dict; CheckpointError where it is of another module."""
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: is of another model: {reason}") from error
