"""Reading a checkpoint. Rows are stored by table and row number: any number of workers can load them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import list_checkpoints, parse_step, step_folder
from hybrid.checkpoint.checkpoint_manifest import (
    MANIFEST_FILE,
    Manifest,
    damage_error,
    find_mismatch,
    is_pre_update_file,
    shard_file,
)
from hybrid.checkpoint.tensor_file import map_arrays, read_tensors
from hybrid.errors import CheckpointError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A checkpoint whose files are read on demand.

    Attributes:
        folder: its folder.
        manifest: its content.
        standing: its rank among the checkpoints of its run, if :meth:`best_valid` has chosen it.
    """

    folder: StoragePath
    manifest: Manifest
    standing: str = ""

    @classmethod
    def open(cls, folder: StoragePath) -> Checkpoint:
        """Open one checkpoint; checksums are not compared.

        Raises:
            CheckpointError: there is none, or a file is missing or has another size than in the manifest.
        """
        if not storage.exists(folder / MANIFEST_FILE):
            raise CheckpointError(f"{folder}: there is no checkpoint here")
        manifest = Manifest.read(folder / MANIFEST_FILE)
        checkpoint = cls(folder, manifest)
        if (path := find_mismatch(checkpoint.parts, manifest.files)) is not None:
            raise damage_error(path)
        return checkpoint

    @property
    def parts(self) -> StoragePath:
        """The folder of all its files except the manifest."""
        return self.folder / self.manifest.parts if self.manifest.parts else self.folder

    @classmethod
    def newest_valid(cls, folder: StoragePath, log: Callable[[str], object]) -> Checkpoint:
        """Open the newest checkpoint of a run whose files all have their checksums.

        Args:
            folder: a run folder; or one of its checkpoints, which then must be valid.
            log: receives one line about newer checkpoints that are damaged.

        Raises:
            CheckpointError: there is none.
        """
        return cls._first_valid(folder, _candidates(folder), [], log)

    @classmethod
    def best_valid(cls, folder: StoragePath, log: Callable[[str], object]) -> Checkpoint:
        """Open the best checkpoint of a run; if it is damaged, the newest valid one.

        Args:
            folder, log: as for :meth:`newest_valid`.

        Raises:
            CheckpointError: there is none.
        """
        newest_first, damage = _candidates(folder), list[CheckpointError]()
        for index, candidate in enumerate(newest_first):
            try:
                best = Manifest.read(candidate / MANIFEST_FILE).best
            except CheckpointError as error:
                damage.append(error)
                continue
            first = candidate if best is None or candidate == folder else step_folder(folder, best.step)
            rest = [first, *(other for other in newest_first[index:] if other != first)]
            checkpoint = cls._first_valid(folder, rest, damage, log)
            if candidate != folder:
                is_newest = checkpoint.folder == newest_first[0]
                last = "the last" if is_newest else f"the last is {newest_first[0].name}"
                checkpoint.standing = last
                if best is not None and parse_step(checkpoint.folder) == best.step:
                    rank = f"the best ({best.metric.replace('_', ' ')} {best.value:.4f})"
                    checkpoint.standing = f"{rank}{' and ' if is_newest else '; '}{last}"
            return checkpoint
        return cls._first_valid(folder, [], damage, log)

    @classmethod
    def _first_valid(
        cls,
        folder: StoragePath,
        candidates: Iterable[StoragePath],
        damage: list[CheckpointError],
        log: Callable[[str], object],
    ) -> Checkpoint:
        """Open the first valid checkpoint of some.

        Args:
            damage: errors of the checkpoints before them.
        """
        for candidate in candidates:
            try:
                checkpoint = cls.open(candidate)
                checkpoint.manifest.verify(checkpoint.parts)
            except CheckpointError as error:
                damage.append(error)
                continue
            if damage:
                log(f"{'; '.join(map(str, damage))}; {candidate.name} is used instead")
            return checkpoint
        if damage:
            raise CheckpointError("; ".join(map(str, damage)))
        raise CheckpointError(f"{folder}: there is no checkpoint here")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Read the named tensors of one file."""
        with self.local_file(name) as path:
            return read_tensors(path)

    def pre_update_rows(self) -> dict[StoragePath, dict[str, Tensor]]:
        """Read the rows that workers have saved as they were before the last update, by file."""
        names = filter(is_pre_update_file, self.manifest.files)
        return {self.parts / name: self.tensors(name) for name in names}

    def map_rows(self, table: str, num_rows: int, dim: int) -> list[npt.NDArray[Any]]:
        """Map the rows of every shard of a table into memory: see :func:`map_arrays`.

        Raises:
            CheckpointError: the table is missing, or has another shape.
        """
        shards = range(self._num_shards(table))
        weights = [self._map(table, shard, len(shards))["weight"] for shard in shards]
        rows_of_each = [len(range(shard, num_rows, len(shards))) for shard in shards]
        if [w.shape for w in weights] != [(rows, dim) for rows in rows_of_each]:
            raise CheckpointError(f"{self.folder}: table {table} has another shape than the model's")
        return weights

    def read_rows(self, table: str, shape: tuple[int, int]) -> Tensor:
        """Read all rows of a table of a given shape.

        Raises:
            CheckpointError: see :meth:`map_rows`.
        """
        shards = self.map_rows(table, *shape)
        rows_RD = np.empty(shape, shards[0].dtype)
        for index, shard in enumerate(shards):
            rows_RD[index :: len(shards)] = shard
        return torch.from_numpy(rows_RD)

    def load_rows(self, table: str, index: int, count: int, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of one shard from the stored shards, whose number may differ.

        Args:
            into: "weight" and optimizer state, as views of shard ``index`` of ``count``.

        Raises:
            CheckpointError: the table is missing, or has another shape or optimizer.
        """
        num_shards = self._num_shards(table)
        for shard in range(num_shards):
            if (slices := _common_rows(index, count, shard, num_shards)) is None:
                continue
            rows, stored_rows = slices
            stored = self._map(table, shard, num_shards)
            widths = {name: array.shape[1:] for name, array in stored.items()}
            if widths != {name: tensor.shape[1:] for name, tensor in into.items()}:
                raise CheckpointError(f"{self.folder}: table {table} has another shape or optimizer")
            for name, tensor in into.items():
                # Copied without a temporary array: there may be no memory for one.
                target, source = tensor.numpy()[rows], stored[name][stored_rows]
                if len(source) < len(target):
                    raise CheckpointError(f"{self.folder}: table {table} has fewer rows than the model's")
                target[:] = source[: len(target)]

    def _num_shards(self, table: str) -> int:
        if table not in self.manifest.tables:
            raise CheckpointError(f"{self.folder}: holds no table {table}; it is of another model")
        return self.manifest.tables[table][2]

    def _map(self, table: str, shard: int, num_shards: int) -> dict[str, npt.NDArray[Any]]:
        name = shard_file(table, shard, num_shards)
        with self.local_file(name) as path:
            arrays = map_arrays(path)
        if "weight" not in arrays or any(array.ndim == 0 for array in arrays.values()):
            raise CheckpointError(f"{self.parts / name}: holds no rows")
        return arrays

    @contextmanager
    def local_file(self, name: str) -> Iterator[Path]:
        """Yield a path of this machine for a file; one in a store is fetched, and verified."""
        path = self.parts / name
        with ExitStack() as stack:
            try:
                _, sha256 = self.manifest.files.get(name, (0, None))
                local_path = stack.enter_context(storage.local_copy(path, sha256))
            except (FileNotFoundError, ValueError) as error:
                raise damage_error(path) from error
            yield local_path


def _candidates(folder: StoragePath) -> list[StoragePath]:
    """Return a checkpoint itself, or those of a run, newest first."""
    return [folder] if storage.exists(folder / MANIFEST_FILE) else list_checkpoints(folder)


def _common_rows(index: int, count: int, other: int, other_count: int) -> tuple[slice, slice] | None:
    """Return where the rows are that shard ``index`` of ``count`` shares with another split's shard.

    Returns:
        Their slice in the first and in the other shard; None if they share none.
    """
    common = math.gcd(count, other_count)
    if (other - index) % common:
        return None
    first = next(row for row in range(other_count) if (row * count + index) % other_count == other)
    here = slice(first, None, other_count // common)
    return here, slice((first * count + index) // other_count, None, count // common)
