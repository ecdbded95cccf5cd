"""An export of tables: a checkpoint without optimizer state, which is written one shard at a time.

A shard has a range of the rows of a table, or of the buckets of a growing table (a bucket has the keys with
the same highest bits). The number of shards is the lowest power of two for which the mean size of a shard is
at most :data:`SHARD_BYTES`, but at most the number of buckets. A later export never has fewer shards.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import (
    CUSTOM_LOOP,
    EXPORTED,
    MANIFEST_FILE,
    VOCABULARIES_FILE,
    Files,
    Manifest,
    shard_file,
    write_text,
)
from hybrid.checkpoint.checkpoint_reader import MappedRows
from hybrid.checkpoint.deltas import ChangedRows, Changes
from hybrid.checkpoint.stored_keys import find_buckets, map_keys
from hybrid.checkpoint.tensor_file import map_arrays, pack_dense, release_pages, write_tensors
from hybrid.data.encode import feature_encoder
from hybrid.embedding.table_spec import TableSpec
from hybrid.inference.table_modules import GrowingTable, Shards
from hybrid.inference.trained_module import TrainedModule
from hybrid.primitives.key_hashes import NUM_BUCKETS, bucket_of, range_of_shard
from hybrid.storage import files as storage
from hybrid.storage.private_files import make_folder

SHARD_BYTES = 64 << 20


class TableExport:
    """The tables of a model. Each call of :meth:`write` applies new changes, and exports all tables.

    The rows come from the files of the model's checkpoint at first, and later from the files of the last
    export. These files stay mapped, so they may be deleted in the meantime.

    Args:
        dtype: data type of the exported rows; None for the data type in the checkpoint.
    """

    def __init__(self, model: TrainedModule, dtype: torch.dtype | None = None) -> None:
        stored = model.trained.stored
        self.model, self._dtype = model, dtype
        self._shards: dict[str, Shards] = {}
        for table in model.table_specs:
            if table.growth is None:
                self._shards[table.name] = stored.map_rows(table.name, table.num_rows, table.dim).shards
            else:
                self._shards[table.name] = [*map_keys(stored, table.name, {"weight": (table.dim,)})]
        self._has_ranges = stored.is_exported
        self._files: Files = {}  # of the last export
        names = [name for name in stored.manifest.files if name.endswith((".json", ".toml"))]
        self._texts = {name: storage.read_text(stored.files_folder / name) for name in names}

    def write(self, folder: Path, changes: Changes, last_folder: Path | None = None) -> list[str]:
        """Write the tables, the dense nets and the encoder into a folder.

        Raise CheckpointError if the folder cannot be written.

        Args:
            changes: changes of the tables since the last export, at first since the checkpoint.
            last_folder: the last export, if it is on this machine. Shards without changes become hard links.

        Returns:
            The names of the files and folders in ``folder`` that were written.
        """
        model, trained = self.model, self.model.trained
        files: Files = {}
        for name, text in self._texts.items():
            files |= write_text(folder, name, text)
        for name, state in model.dense_states.items():
            files |= write_tensors(folder, name, pack_dense(state, {}))
        trained.encoder.save(folder)
        for name in (feature_encoder.FILE_NAME, VOCABULARIES_FILE):
            files[name] = (folder / name).stat().st_size, storage.compute_checksum(folder / name)
        shapes = {}
        for table in model.table_specs:
            files |= self._write_table(table, changes.get(table.name, ()), folder, last_folder)
            shapes[table.name] = table.num_rows, table.dim, len(self._shards[table.name])
        self._has_ranges, self._files = True, files
        source = trained.stored.manifest
        progress = {EXPORTED: True} | dict.fromkeys(source.progress.keys() & {CUSTOM_LOOP}, True)
        Manifest(model.step, source.epoch, shapes, files, progress=progress).write(folder)
        return [*dict.fromkeys(name.partition("/")[0] for name in files), MANIFEST_FILE]

    def _write_table(
        self, table: TableSpec, changes: Sequence[ChangedRows], folder: Path, last: Path | None
    ) -> Files:
        """Write the shards of a table. The next export reads the table from these shards."""
        shards, count = self._shards[table.name], self._num_shards(table, changes)
        total = table.num_rows if table.growth is None else NUM_BUCKETS
        files: Files = {}
        new: list[Mapping[str, npt.NDArray[Any]]] = []
        for index in range(count):
            name = shard_file(table.name, index, count)
            path = folder / name
            part = range_of_shard(index, count, total)
            own = _select(changes, part, table.growth is not None)
            if last is not None and name in self._files and not own:
                make_folder(path.parent)
                with suppress(OSError):  # such as a file system without hard links
                    os.link(last / name, path)
            if path.exists():
                files[name] = self._files[name]
                new.append(shards[index])
                continue
            files |= write_tensors(folder, name, self._read(table, part, own))
            new.append(map_arrays(path))
            for shard in shards:
                release_pages(shard["weight"])
        self._shards[table.name] = new
        return files

    def _num_shards(self, table: TableSpec, changes: Sequence[ChangedRows]) -> int:
        shards, num_rows = self._shards[table.name], table.num_rows
        if table.growth is not None:
            num_rows = sum(len(shard["weight"]) for shard in shards) + sum(len(each.rows) for each in changes)
        num_bytes = num_rows * (table.dim * self._row_dtype(table).itemsize + 8)  # a key has 8 bytes
        count = min(1 << max(0, -(-num_bytes // SHARD_BYTES) - 1).bit_length(), NUM_BUCKETS)
        return max(count, len(shards)) if self._has_ranges else count  # does not oscillate

    def _row_dtype(self, table: TableSpec) -> torch.dtype:
        return self._dtype or self.model.row_dtype(table)

    def _read(self, table: TableSpec, part: range, changes: Sequence[ChangedRows]) -> dict[str, Tensor]:
        """Return the rows (and keys, if the table grows) in the range ``part``, with ``changes`` applied."""
        shards, dtype = self._shards[table.name], self._row_dtype(table)
        if table.growth is None:
            mapped = MappedRows(shards, table.num_rows, self._has_ranges)
            weight_RD = mapped.read(np.arange(part.start, part.stop))["weight"]
            for change in changes:
                weight_RD[change.rows - part.start] = change.weight
            return {"weight": torch.from_numpy(weight_RD).to(dtype)}
        slices = [(shard, find_buckets(shard["keys"], part)) for shard in shards]
        arrays = [{name: shard[name][own] for name in ("keys", "weight")} for shard, own in slices]
        rows = GrowingTable(table, 0, arrays, self.model.dtype)
        for change in changes:
            rows.update(*map(torch.from_numpy, change))
        return {"keys": rows.keys, "weight": rows.weight.detach()[:-1].to(dtype)}


def _select(changes: Sequence[ChangedRows], part: range, is_growing: bool) -> list[ChangedRows]:
    """Return the changes in ``part``: a range of row numbers, or of buckets if the table is growing."""
    position_of = bucket_of if is_growing else np.asarray
    selected = []
    for change in changes:
        positions = position_of(change.rows), position_of(change.evicted)
        own_U, own_E = (np.flatnonzero((part.start <= each) & (each < part.stop)) for each in positions)
        if len(own_U) or len(own_E):
            selected.append(ChangedRows(change.rows[own_U], change.weight[own_U], change.evicted[own_E]))
    return selected
