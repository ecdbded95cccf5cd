"""Reading of checkpoints, also by more or fewer workers than those that wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import (
    CURRENT_FILE,
    EXPORTED,
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
from hybrid.primitives.bfloat16_arrays import assign_rows, to_floats
from hybrid.primitives.key_hashes import range_of_shard
from hybrid.storage import files as storage
from hybrid.storage.file_formats import is_inner_name, parse_json
from hybrid.storage.remote_path import StoragePath

_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True, eq=False)
class MappedRows:
    """The rows of a table that does not grow, and their optimizer state, in mapped files.

    If ``has_ranges``, each shard is a range of rows. Otherwise, row r is in shard r mod the number of shards.
    """

    shards: Sequence[Mapping[str, npt.NDArray[Any]]]
    num_rows: int
    has_ranges: bool

    def rows_of_shard(self, index: int) -> slice:
        """Return the slice of the table's rows that shard ``index`` has."""
        count = len(self.shards)
        if not self.has_ranges:
            return slice(index, self.num_rows, count)
        rows = range_of_shard(index, count, self.num_rows)
        return slice(rows.start, rows.stop)

    def read(self, rows_N: npt.NDArray[np.int64], with_state: bool = False) -> dict[str, npt.NDArray[Any]]:
        """Copy rows ("weight") and, if ``with_state``, their optimizer state; bfloat16 becomes float32."""
        count = len(self.shards)
        if self.has_ranges:
            shard_N = rows_N * count // self.num_rows
            index_N = rows_N + -shard_N * self.num_rows // count
        else:
            shard_N, index_N = rows_N % count, rows_N // count
        arrays = {
            name: np.empty((len(rows_N), *array.shape[1:]), to_floats(array[:0]).dtype)
            for name, array in self.shards[0].items()
            if with_state or name == "weight"
        }
        order_N = shard_N.argsort(kind="stable")
        sizes = np.bincount(shard_N, minlength=count)
        ends = sizes.cumsum()
        for number in np.flatnonzero(sizes).tolist():
            own = order_N[ends[number] - sizes[number] : ends[number]]
            for name, array in arrays.items():
                array[own] = to_floats(self.shards[number][name][index_N[own]])
        return arrays


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A checkpoint, an export or a delta, whose files are read on demand.

    Methods raise StorageError if a store fails, or a path is a symbolic link or cannot be accessed.
    ``best_valid`` sets ``rank_text`` for messages, such as "the best (auc 0.8361) and the last".
    """

    folder: StoragePath
    manifest: Manifest
    rank_text: str = ""

    @classmethod
    def open(cls, folder: StoragePath) -> Checkpoint:
        """Open the checkpoint in ``folder``; compare the sizes of its files, but not their checksums.

        Raise CheckpointError if there is no checkpoint or valid manifest, or a file is missing or incomplete.
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

    @property
    def is_exported(self) -> bool:
        """Whether this is an export, without optimizer state; each shard is a range of rows or buckets."""
        return EXPORTED in self.manifest.progress

    @classmethod
    def newest_valid(cls, folder: StoragePath, log: Callable[[str], object]) -> Checkpoint:
        """Open a run's newest valid checkpoint, whose files pass :meth:`Manifest.verify`.

        Raise CheckpointError if no checkpoint is valid.

        Args:
            folder: a run folder, or a checkpoint, which is then the only candidate.
            log: receives one line about newer checkpoints, if they are damaged.
        """
        return cls._first_valid(folder, _candidates(folder), log)

    @classmethod
    def best_valid(cls, folder: StoragePath, log: Callable[[str], object]) -> Checkpoint:
        """Open a run's best checkpoint; if the best is damaged or unknown, open the newest valid checkpoint.

        Args:
            folder: a run folder, a checkpoint, an export, or the output of ``hybrid export --follow``, whose
                newest export is opened.
            log: receives one line about damaged checkpoints that are skipped.

        Raises:
            CheckpointError: no checkpoint is valid.
        """
        folder = _newest_export(folder)
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
        """Read the tensors of a file; CheckpointError if it is missing or damaged."""
        return read_tensors(*self._source(name))

    def map_rows(self, table: str, num_rows: int, dim: int) -> MappedRows:
        """Map the shards of a table into memory, read-only. Not for growing tables.

        Raise CheckpointError if the table is missing, is damaged, or is not of shape (``num_rows``, ``dim``).
        """
        shards = [self.map_shard(table, index) for index in range(self.num_shards(table))]
        mapped = MappedRows(shards, num_rows, self.is_exported)
        for index, shard in enumerate(shards):
            lengths = {len(array) for array in shard.values()}
            expected = len(range(*mapped.rows_of_shard(index).indices(num_rows)))
            if lengths != {expected} or shard["weight"].shape[1:] != (dim,):
                raise CheckpointError(f"{self.folder}: table {table} has another shape than the model's")
        return mapped

    def read_rows(self, table: str, shape: tuple[int, int]) -> Tensor:
        """Read all rows of a table that does not grow, in the stored type; errors as in :meth:`map_rows`."""
        mapped = self.map_rows(table, *shape)
        weights = [shard["weight"] for shard in mapped.shards]
        kind = weights[0].dtype
        rows_RD = torch.empty(shape, dtype=torch.bfloat16 if kind == "V2" else getattr(torch, kind.name))
        for index, weight in enumerate(weights):
            assign_rows(rows_RD, mapped.rows_of_shard(index), weight)
        return rows_RD

    def load_rows(self, table: str, index: int, count: int, into: Mapping[str, Tensor]) -> None:
        """Copy rows ``index``, ``index + count`` etc., with optimizer state, into the shard of a worker.

        The checkpoint must not be an export. It may have more or fewer shards than ``count``.

        Args:
            count: number of shards of the table on the workers.
            into: rows ("weight") and optimizer state of shard ``index``.

        Raises:
            CheckpointError: the table is missing or damaged, or its shape or optimizer does not fit ``into``.
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
                target, source = tensor[rows], stored[name][stored_rows]
                if len(source) != len(target):
                    rule = "has more or fewer rows than the model's"
                    raise CheckpointError(f"{self.folder}: table {table} {rule}")
                # No temporary array of all rows: the memory may be too small for one.
                for start in range(0, len(target), _BLOCK_ROWS):
                    block = slice(start, min(start + _BLOCK_ROWS, len(target)))
                    assign_rows(target, block, source[block])

    def num_shards(self, table: str) -> int:
        """Return the number of files of a table; CheckpointError if the table is missing."""
        if table not in self.manifest.tables:
            raise CheckpointError(f"{self.folder}: holds no table {table}; it is of another model")
        return self.manifest.tables[table][2]

    def map_shard(self, table: str, index: int) -> dict[str, npt.NDArray[Any]]:
        """Map the arrays of one file of a table into memory; CheckpointError if it is damaged."""
        name = shard_file(table, index, self.num_shards(table))
        arrays = map_arrays(*self._source(name))
        is_float = "weight" in arrays and arrays["weight"].dtype.kind in "fV"
        if not is_float or any(array.ndim == 0 for array in arrays.values()):
            raise CheckpointError(f"{self.files_folder / name}: holds no rows")
        return arrays

    def _source(self, name: str) -> tuple[StoragePath, str | None, StoragePath]:
        _, sha256 = self.manifest.files.get(name, (0, None))
        return self.files_folder / name, sha256, self.files_folder


def _candidates(folder: StoragePath) -> list[StoragePath]:
    return [folder] if storage.exists(folder / MANIFEST_FILE) else list_checkpoints(folder)


def _newest_export(folder: StoragePath) -> StoragePath:
    """Return the newest export if ``folder`` is the output of ``hybrid export --follow``, else ``folder``."""
    path = folder / CURRENT_FILE
    if not storage.exists(path):
        return folder
    try:
        name: str = parse_json(storage.read_bytes(path))["folder"]
        if not is_inner_name(name):
            raise ValueError("it leads out of the folder")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: does not name an exported folder ({error})") from error
    return folder / name
