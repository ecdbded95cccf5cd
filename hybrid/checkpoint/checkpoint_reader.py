"""The reader of a checkpoint. Any number of workers can load its rows, which are stored by table and row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import (
    MANIFEST_FILE,
    Manifest,
    damage_error,
    find_mismatch,
    list_checkpoints,
    shard_file,
    step_folder,
)
from hybrid.checkpoint.tensor_file import map_arrays, read_tensors
from hybrid.errors import CheckpointError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A checkpoint whose files are read on demand."""

    folder: StoragePath
    manifest: Manifest
    # Description for messages, such as "the best (auc 0.8361) and the last"; set by best_valid.
    rank_text: str = ""

    @classmethod
    def open(cls, folder: StoragePath) -> Checkpoint:
        """Open one checkpoint. :meth:`Manifest.verify` compares the checksums.

        Raises:
            CheckpointError: there is none, or a file is missing or its size differs from the manifest.
        """
        if not storage.exists(folder / MANIFEST_FILE):
            raise CheckpointError(f"{folder}: there is no checkpoint here")
        manifest = Manifest.read(folder / MANIFEST_FILE)
        checkpoint = cls(folder, manifest)
        if (path := find_mismatch(checkpoint.files_folder, manifest.files)) is not None:
            raise damage_error(path)
        return checkpoint

    @property
    def files_folder(self) -> StoragePath:
        """The folder of all files except the manifest."""
        return self.folder / self.manifest.parts

    @classmethod
    def newest_valid(cls, folder: StoragePath, log: Callable[[str], object]) -> Checkpoint:
        """Open the newest checkpoint of a run with valid checksums (:meth:`Manifest.verify`).

        Args:
            folder: a run folder, or a checkpoint, which must then be valid.
            log: receives one line about newer checkpoints that are damaged.

        Raises:
            CheckpointError: there is none.
        """
        return cls._first_valid(folder, _candidates(folder), log)

    @classmethod
    def best_valid(cls, folder: StoragePath, log: Callable[[str], object]) -> Checkpoint:
        """Open the best checkpoint of a run; if it is damaged, the newest (:meth:`newest_valid`)."""
        candidates, best = _candidates(folder), None
        if candidates == [folder]:
            return cls._first_valid(folder, candidates, log)
        for candidate in candidates:
            with suppress(CheckpointError):
                best = Manifest.read(candidate / MANIFEST_FILE).best
                break
        first = [] if best is None else [step_folder(folder, best.step)]
        checkpoint = cls._first_valid(folder, dict.fromkeys([*first, *candidates]), log)
        is_newest = checkpoint.folder == candidates[0]
        checkpoint.rank_text = "the last" if is_newest else f"the last is {candidates[0].name}"
        if best is not None and checkpoint.folder in first:
            best_text = f"the best ({best.metric.replace('_', ' ')} {best.value:.4f})"
            checkpoint.rank_text = f"{best_text}{' and ' if is_newest else '; '}{checkpoint.rank_text}"
        return checkpoint

    @classmethod
    def _first_valid(
        cls, folder: StoragePath, candidates: Iterable[StoragePath], log: Callable[[str], object]
    ) -> Checkpoint:
        damage = []
        for candidate in candidates:
            try:
                checkpoint = cls.open(candidate)
                checkpoint.manifest.verify(checkpoint.files_folder)
            except CheckpointError as error:
                damage.append(str(error))
                continue
            if damage:
                log(f"{'; '.join(damage)}; {candidate.name} is used instead")
            return checkpoint
        raise CheckpointError("; ".join(damage) or f"{folder}: no such folder, or no checkpoint in it")

    def tensors(self, name: str) -> dict[str, Tensor]:
        return read_tensors(*self._source(name))

    def map_rows(self, table: str, num_rows: int, dim: int) -> list[npt.NDArray[Any]]:
        """Map the rows of every shard of a table into memory; see :func:`map_arrays`.

        Raises:
            CheckpointError: the table is missing, or its shape differs.
        """
        return [shard["weight"] for shard in self._map_shards(table, num_rows, dim)]

    def row_reader(self, table: str) -> Callable[[npt.NDArray[np.int64]], dict[str, npt.NDArray[Any]]]:
        """Return a function from row numbers to the rows ("weight") of a table and their optimizer state.

        Raises:
            CheckpointError: the table is missing, or its shape differs from the manifest.
        """
        self.num_shards(table)
        shards = self._map_shards(table, *self.manifest.tables[table][:2])

        def read(rows_N: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
            shard_N, index_N = rows_N % len(shards), rows_N // len(shards)
            tensors = {name: np.empty((len(rows_N), *a.shape[1:]), a.dtype) for name, a in shards[0].items()}
            for number, shard in enumerate(shards):
                own_N = shard_N == number
                for name, array in tensors.items():
                    array[own_N] = shard[name][index_N[own_N]]
            return tensors

        return read

    def read_rows(self, table: str, shape: tuple[int, int]) -> Tensor:
        """Read all rows of a table of a given shape; see :meth:`map_rows`."""
        shards = self.map_rows(table, *shape)
        rows_RD = np.empty(shape, shards[0].dtype)
        for index, shard in enumerate(shards):
            rows_RD[index :: len(shards)] = shard
        return torch.from_numpy(rows_RD)

    def load_rows(self, table: str, index: int, count: int, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of one shard from a checkpoint with any number of shards.

        Args:
            into: "weight" and optimizer state of shard ``index`` of ``count``, as views.

        Raises:
            CheckpointError: the table is missing, or its shape or optimizer differs.
        """
        num_shards = self.num_shards(table)
        common = math.gcd(count, num_shards)
        period = num_shards // common
        for first in range(period):
            # Row i of the target is row index + count * i of the table.
            start, shard = divmod(index + count * first, num_shards)
            rows, stored_rows = slice(first, None, period), slice(start, None, count // common)
            stored = self.map_shard(table, shard)
            widths = {name: array.shape[1:] for name, array in stored.items()}
            if widths != {name: tensor.shape[1:] for name, tensor in into.items()}:
                raise CheckpointError(f"{self.folder}: table {table} has another shape or optimizer")
            for name, tensor in into.items():
                # No temporary array: the memory may be too small for one.
                target, source = tensor.numpy()[rows], stored[name][stored_rows]
                if len(source) < len(target):
                    raise CheckpointError(f"{self.folder}: table {table} has fewer rows than the model's")
                target[:] = source[: len(target)]

    def _map_shards(self, table: str, num_rows: int, dim: int) -> list[dict[str, npt.NDArray[Any]]]:
        count = self.num_shards(table)
        shards = [self.map_shard(table, index) for index in range(count)]
        for index, shard in enumerate(shards):
            lengths = {len(array) for array in shard.values()}
            if lengths != {len(range(index, num_rows, count))} or shard["weight"].shape[1:] != (dim,):
                raise CheckpointError(f"{self.folder}: table {table} has another shape than the model's")
        return shards

    def num_shards(self, table: str) -> int:
        """Return the number of files of a table; CheckpointError if the table is missing."""
        if table not in self.manifest.tables:
            raise CheckpointError(f"{self.folder}: holds no table {table}; it is of another model")
        return self.manifest.tables[table][2]

    def map_shard(self, table: str, index: int) -> dict[str, npt.NDArray[Any]]:
        """Map the arrays of a shard of a table into memory; see :func:`map_arrays`."""
        name = shard_file(table, index, self.num_shards(table))
        arrays = map_arrays(*self._source(name))
        is_float = "weight" in arrays and arrays["weight"].dtype.kind == "f"
        if not is_float or any(array.ndim == 0 for array in arrays.values()):
            raise CheckpointError(f"{self.files_folder / name}: holds no rows")
        return arrays

    def _source(self, name: str) -> tuple[StoragePath, str | None, StoragePath]:
        """Return path and checksum of a file, and the folder below which links are not followed."""
        _, sha256 = self.manifest.files.get(name, (0, None))
        return self.files_folder / name, sha256, self.files_folder


def _candidates(folder: StoragePath) -> list[StoragePath]:
    """If ``folder`` is a checkpoint, return it, else return all checkpoints of the run, newest first."""
    return [folder] if storage.exists(folder / MANIFEST_FILE) else list_checkpoints(folder)
