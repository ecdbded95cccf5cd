"""Reading a checkpoint. Rows are keyed by table and row, not by worker: any number of workers loads it."""

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

from hybrid.checkpoint.checkpoint_files import (
    MANIFEST_FILE,
    damage_error,
    find_mismatch,
    is_pre_update_file,
    shard_file,
)
from hybrid.checkpoint.checkpoint_folders import list_checkpoints, parse_step, step_folder
from hybrid.checkpoint.checkpoint_manifest import Best, Manifest
from hybrid.checkpoint.tensor_file import map_arrays, read_tensors
from hybrid.errors import CheckpointError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A checkpoint, read piece by piece.

    Attributes:
        folder, manifest: where it is, and what it holds.
        standing: what it is among those of its run, where it was chosen as :meth:`best_valid`.
    """

    folder: StoragePath
    manifest: Manifest
    standing: str = ""

    @classmethod
    def open(cls, folder: StoragePath) -> Checkpoint:
        """Open one checkpoint, which may have been altered without a change of size.

        Raises:
            CheckpointError: there is none, or a file is missing or has another size than it had.
        """
        if not storage.exists(folder / MANIFEST_FILE):
            raise CheckpointError(f"{folder}: there is no checkpoint here")
        manifest = Manifest.read(folder / MANIFEST_FILE)
        found = cls(folder, manifest)
        if (path := find_mismatch(found.parts, manifest.files)) is not None:
            raise damage_error(path)
        return found

    @property
    def parts(self) -> StoragePath:
        """The folder of all its files but the manifest."""
        return self.folder / self.manifest.parts if self.manifest.parts else self.folder

    @classmethod
    def newest_valid(cls, folder: StoragePath, say: Callable[[str], object]) -> Checkpoint:
        """The newest checkpoint of a run of which every file is as it was written.

        Args:
            folder: a run folder; or one of its checkpoints, which then must be good itself.
            say: told, in one line, of newer ones that are not.

        Raises:
            CheckpointError: there is none.
        """
        return cls._first_good(folder, _candidates(folder), [], say)

    @classmethod
    def best_valid(cls, folder: StoragePath, say: Callable[[str], object]) -> Checkpoint:
        """The best checkpoint of a run; where it is not as it was written, the newest that is.

        Args:
            folder, say: as for :meth:`newest_valid`.

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
            found = cls._first_good(folder, rest, damage, say)
            if candidate != folder:
                found.standing = _standing(found.folder, newest_first[0], best)
            return found
        return cls._first_good(folder, [], damage, say)

    @classmethod
    def _first_good(
        cls,
        folder: StoragePath,
        candidates: Iterable[StoragePath],
        damage: list[CheckpointError],
        say: Callable[[str], object],
    ) -> Checkpoint:
        """The first of some checkpoints that is as it was written.

        Args:
            damage: of those that come before them.
        """
        for candidate in candidates:
            try:
                found = cls.open(candidate)
                found.manifest.verify(found.parts)
            except CheckpointError as error:
                damage.append(error)
                continue
            if damage:
                say(f"{'; '.join(map(str, damage))}; {candidate.name} is taken instead")
            return found
        if damage:
            raise CheckpointError("; ".join(map(str, damage)))
        raise CheckpointError(f"{folder}: there is no checkpoint here")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The named tensors of one file."""
        with self.local(name) as path:
            return read_tensors(path)

    def pre_update_rows(self) -> dict[StoragePath, dict[str, Tensor]]:
        """What workers have saved of rows before the last update, by file; nothing where nobody has."""
        names = filter(is_pre_update_file, self.manifest.files)
        return {self.parts / name: self.tensors(name) for name in names}

    def map_rows(self, table: str, num_rows: int, dim: int) -> list[npt.NDArray[Any]]:
        """The rows of every shard of a table, in their files: see :func:`map_arrays`.

        Raises:
            CheckpointError: the table is not there, or has another shape.
        """
        shards = range(self._num_shards(table))
        weights = [self._map(table, shard, len(shards))["weight"] for shard in shards]
        rows_of_each = [len(range(shard, num_rows, len(shards))) for shard in shards]
        if [w.shape for w in weights] != [(rows, dim) for rows in rows_of_each]:
            raise CheckpointError(f"{self.folder}: table {table} has another shape than the model's")
        return weights

    def read_rows(self, table: str, shape: tuple[int, int]) -> Tensor:
        """All rows of a table, of a given shape, in memory; read shard by shard.

        Raises:
            CheckpointError: see :meth:`map_rows`.
        """
        shards = self.map_rows(table, *shape)
        rows_RD = np.empty(shape, shards[0].dtype)
        for index, shard in enumerate(shards):
            rows_RD[index :: len(shards)] = shard
        return torch.from_numpy(rows_RD)

    def load_rows(self, table: str, index: int, count: int, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of one shard, split in whatever way, from the shards on disk.

        Args:
            into: "weight" and optimizer state, as views of shard ``index`` of ``count``.

        Raises:
            CheckpointError: the table is not there, or has another shape or optimizer.
        """
        num_shards = self._num_shards(table)
        for shard in range(num_shards):
            if (both := _rows_of_both(index, count, shard, num_shards)) is None:
                continue
            here, there = both
            on_disk = self._map(table, shard, num_shards)
            widths = {name: array.shape[1:] for name, array in on_disk.items()}
            if widths != {name: tensor.shape[1:] for name, tensor in into.items()}:
                raise CheckpointError(f"{self.folder}: table {table} has another shape or optimizer")
            for name, tensor in into.items():
                # From the mapped file to its place: memory for a copy between them there may not be.
                to, source = tensor.numpy()[here], on_disk[name][there]
                if len(source) < len(to):
                    raise CheckpointError(f"{self.folder}: table {table} has fewer rows than the model's")
                to[:] = source[: len(to)]

    def _num_shards(self, table: str) -> int:
        if table not in self.manifest.tables:
            raise CheckpointError(f"{self.folder}: holds no table {table}; it is of another model")
        return self.manifest.tables[table][2]

    def _map(self, table: str, shard: int, num_shards: int) -> dict[str, npt.NDArray[Any]]:
        name = shard_file(table, shard, num_shards)
        with self.local(name) as path:
            arrays = map_arrays(path)
        if "weight" not in arrays or any(array.ndim == 0 for array in arrays.values()):
            raise CheckpointError(f"{self.parts / name}: holds no rows")
        return arrays

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """A path of a file, for as long as this lasts; of a store, it is fetched, and must be as it was."""
        place = self.parts / name
        with ExitStack() as stack:
            try:
                _, sha256 = self.manifest.files.get(name, (0, None))
                path = stack.enter_context(storage.local_copy(place, sha256))
            except (FileNotFoundError, ValueError) as error:
                raise damage_error(place) from error
            yield path


def _standing(folder: StoragePath, newest: StoragePath, best: Best | None) -> str:
    """What a checkpoint of a run is among the others, in words."""
    last = "the last" if folder == newest else f"the last is {newest.name}"
    if best is None or parse_step(folder) != best.step:
        return last
    metric = best.metric.replace("_", " ")
    return f"the best ({metric} {best.value:.4f}){' and ' if folder == newest else '; '}{last}"


def _candidates(folder: StoragePath) -> list[StoragePath]:
    """A checkpoint itself, or those of a run, newest first."""
    return [folder] if storage.exists(folder / MANIFEST_FILE) else list_checkpoints(folder)


def _rows_of_both(index: int, count: int, other: int, other_count: int) -> tuple[slice, slice] | None:
    """The rows of shard ``index`` of ``count`` that are also of another way to split: where in either."""
    common = math.gcd(count, other_count)
    if (other - index) % common:
        return None
    first = next(row for row in range(other_count) if (row * count + index) % other_count == other)
    here = slice(first, None, other_count // common)
    return here, slice((first * count + index) // other_count, None, count // common)
