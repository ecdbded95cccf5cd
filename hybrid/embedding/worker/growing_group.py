"""A growing table on a worker: keys need not be known in advance; updates add and remove rows.

A lookup returns the row of a key, or the initial row if the key has no row. Lookups change nothing. The
update of a step, in order:

1. Each key that the step has read is counted once, however often and on however many trainers.
2. Keys with a count of at least ``admit_after`` get rows, if their bucket (one of 1024) has fewer rows than
   ``max_rows`` / 1024. Counts are halved at each half-life.
3. The optimizer updates the keys with rows. Gradients of other keys are dropped.
4. In some buckets of the table, keys that are seldom or no longer read lose their rows.

``key_maps.py`` does steps 1, 2 and 4. Their results depend on step numbers and keys only, not on the number
of workers, the time, or the order in which messages arrive.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import psutil
import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.stored_keys import OTHER_SHAPE, pack_keys, read_keys
from hybrid.embedding.bags import Bags
from hybrid.embedding.initial_rows import assign_stored, initial_blocks, keys_of, random_rows, saved_table
from hybrid.embedding.kernels import KEYS_END, Ints
from hybrid.embedding.placement import ShardGroup, bytes_per_row
from hybrid.embedding.row_gradients import RowGradients
from hybrid.embedding.stored_matrix import SavedRows
from hybrid.embedding.worker.key_maps import KeyMap, copy_rows
from hybrid.embedding.worker.table_groups import TableGroup
from hybrid.errors import CheckpointError
from hybrid.primitives.bfloat16_arrays import as_array, assign_rows
from hybrid.primitives.huge_pages import zeros_in_large_pages
from hybrid.primitives.key_hashes import bucket_of
from hybrid.updates.ticket import Purpose


class GrowingGroup(TableGroup):
    """A :class:`TableGroup` that consists of one shard of a growing table."""

    def __init__(self, group: ShardGroup, dtype: torch.dtype) -> None:
        (self._shard,) = group.shards
        self._table = self._shard.table
        assert self._table.growth is not None
        self._growth = self._table.growth
        self._steps_before = 0  # steps of earlier runs, which records count
        self._events: Counter[str] = Counter()
        self._evicted: list[Ints] = []  # keys that lost their rows since changes are tracked
        # Lookups of evaluations, and in async mode those of steps, may run during an update.
        self._lock = threading.Lock()
        # Addresses cost nothing, so they are reserved for as many rows as the host's memory would hold.
        self._capacity = psutil.virtual_memory().total // bytes_per_row(self._table)
        self._keys = KeyMap(self._shard, self._growth, self._capacity)
        super().__init__(group, dtype, self._capacity, partial(zeros_in_large_pages, is_overcommitted=True))
        self.ids_end = KEYS_END

    def initialize(self, seed: int) -> dict[str, int]:
        """Add the keys and rows of ``table.initial``, if any; return the number of keys by table name."""
        self._seed = seed
        if not self._table.initial:
            return {}
        saved = saved_table(self._table) if self._table.initial_table else None
        if saved is not None and not saved.checkpoint.is_exported and saved.encodings[0].is_growing:
            names = [*self._tensors] if self._table.has_initial_state else ["weight"]
            matches = self._read_keys(saved.checkpoint, saved.name, names)
        else:
            matches = sum(map(self._add_rows, initial_blocks(self._table)))
        return {self._table.name: matches}

    def _add_rows(self, block: SavedRows) -> int:
        keys_B = keys_of(block.keys)
        buckets_B = bucket_of(keys_B)
        own = np.flatnonzero(
            (buckets_B >= self._shard.buckets.start) & (buckets_B < self._shard.buckets.stop)
        )
        _, backwards = np.unique(keys_B[own][::-1], return_index=True)
        own = own[len(own) - 1 - backwards]  # the last row of each key
        keys_U, stored = keys_B[own], block.read(own)
        is_new_U = self._keys.find(keys_U) < 0
        records_R2 = np.stack([keys_U, np.full(len(own), self._growth.admit_after << 32)], axis=1)
        self._keys.load(records_R2[is_new_U], np.empty((0, 2), np.int64))
        assign_stored(self._table, self._tensors, self._keys.find(keys_U), stored)
        return int(is_new_U.sum())

    def _read_keys(
        self, checkpoint: Checkpoint, table: str, names: Sequence[str], *, is_exact: bool = False
    ) -> int:
        """Read this shard's keys, and the tensors ``names`` of their rows; return the number of rows.

        With ``is_exact``, the rows must have no tensors besides ``names``, else raise CheckpointError.
        """
        tensors = {name: self._tensors[name] for name in names}
        widths = {name: tuple(tensor.shape[1:]) for name, tensor in tensors.items()}
        start = self._keys.end
        for keys in read_keys(checkpoint, table, self._shard.buckets, widths):
            if is_exact and keys.rows.keys() != widths.keys():
                raise CheckpointError(f"{checkpoint.folder}: table {table} {OTHER_SHAPE}")
            rows = slice(self._keys.end, self._keys.end + len(keys.records_R2))
            self._keys.load(keys.records_R2, keys.pending_P2)
            self._steps_before = keys.num_steps
            for name, tensor in tensors.items():
                assign_rows(tensor, rows, keys.rows[name])
        return self._keys.end - start

    def pool(self, bags: Bags, purpose: Purpose) -> tuple[Tensor, Bags]:
        """Return the row of each key, and ``bags``. A key without a row gets its initial row.

        In evaluations with ``Growth.unknown`` = "zeros", a key without a row gets zeros.
        """
        keys_U = bags.ids_L.numpy()
        vectors_UD = self._buffers.empty((len(keys_U), self.group.dim), self.weight_RD.dtype)
        with self._lock:
            rows_U = self._keys.find(keys_U)
            num_absent = copy_rows(as_array(self.weight_RD), rows_U, as_array(vectors_UD))
            self._events.update(lookups=len(keys_U), unknown=num_absent)
        if num_absent:
            absent = np.flatnonzero(rows_U < 0)
            has_zeros = purpose is Purpose.PREDICT and self._growth.unknown == "zeros"
            vectors_UD[torch.from_numpy(absent)] = 0.0 if has_zeros else self._initial_rows(keys_U[absent])
        return vectors_UD, bags

    def begin_update(self, gradients: RowGradients, step: int) -> RowGradients:
        """Count the step's keys; give rows to keys with high counts. Return gradients of keys with rows."""
        super().begin_update(gradients, step)
        keys_U = gradients.rows_U.numpy()
        with self._lock:
            rows_U, new = self._keys.count(keys_U, self._steps_before + step)
            self._events.update(admitted=len(new))
            new_rows = torch.from_numpy(rows_U[new])
            self.weight_RD[new_rows] = self._initial_rows(keys_U[new])
            for tensor in self.optimizer.state.values():
                tensor[new_rows] = 0.0  # a removed key may have had the row
        return gradients.select(torch.from_numpy(rows_U))

    def _locate(self, rows_U: Ints) -> tuple[Ints, Ints]:
        return np.zeros(len(rows_U), np.int64), self._keys.keys_of(rows_U)

    def end_update(self, step: int) -> None:
        """Remove seldom-read keys from some buckets. Enlarge hash tables for the keys of later updates."""
        growth = self._growth
        with self._lock:
            if growth.max_rows or growth.evict_after or growth.admit_after > 1:
                evicted = self._keys.sweep(self._steps_before + step)
                self._events.update(evicted=len(evicted))
                if self._is_changed_R is not None and len(evicted):
                    self._evicted.append(evicted)
            self._keys.grow()

    def take_counts(self) -> dict[str, dict[str, int]]:
        """Return, by table name, the numbers of rows, of pending keys, and of events since the last call.

        Pending keys are counted, and have no row yet. Events are ``lookups`` of keys, lookups of ``unknown``
        keys (without a row), and keys that were ``admitted`` (got a row) or ``evicted`` (lost their row).
        """
        with self._lock:
            rows, pending = self._keys.sizes
            counts = {"rows": rows, "pending": pending, **self._events}
            self._events.clear()
        return {self._table.name: counts}

    def describe(self, row: int) -> str:
        return f"a key of table {self._table.name}"

    def load(self, checkpoint: Checkpoint) -> None:
        self._keys = KeyMap(self._shard, self._growth, self._capacity)
        self._read_keys(checkpoint, self._table.name, [*self._tensors], is_exact=True)
        self._steps_before -= checkpoint.manifest.step

    def files(self, is_copied: bool) -> dict[str, Callable[[], Mapping[str, Tensor]]]:
        records_R2, pending_P2 = self._keys.state()
        tensors = self._copies(len(records_R2)) if is_copied else self._tensors
        pack = partial(pack_keys, records_R2, pending_P2, self._steps_before, tensors)
        return {self._shard.file_name: pack}

    def track_changes(self) -> None:
        super().track_changes()
        self._evicted = []

    def take_changes(self) -> dict[str, dict[str, Tensor]]:
        """Return a delta's tensors: changed rows with their keys, and evicted keys. Forget the changes."""
        assert self._is_changed_R is not None
        records_R2, _ = self._keys.state()
        is_changed_R = self._is_changed_R[: len(records_R2)].numpy() & (records_R2[:, 1] >= 0)
        rows_U = np.flatnonzero(is_changed_R)
        evicted = np.unique(np.concatenate([np.empty(0, np.int64), *self._evicted]))
        evicted = evicted[self._keys.find(evicted) < 0]  # a key may have a row again
        self.track_changes()
        tensors = {
            "keys": torch.from_numpy(records_R2[rows_U, 0]),
            "weight": self.weight_RD.index_select(0, torch.from_numpy(rows_U)),
            "evicted": torch.from_numpy(evicted),
        }
        return {self._shard.file_name: tensors}

    def _initial_rows(self, keys_U: Ints) -> Tensor:
        return random_rows(keys_U.view(np.uint64), self._table, self._seed).to(self.weight_RD.dtype)
