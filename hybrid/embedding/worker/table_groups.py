"""The rows of a worker by group, their copies for checkpoints, and the update of a step."""

import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags, concatenate, ids_dtype, pool_and_record, pool_vectors
from hybrid.embedding.initial_rows import fill_random_rows, random_salt, read_initial_rows
from hybrid.embedding.kernels import Ints
from hybrid.embedding.placement import Shard, ShardGroup
from hybrid.embedding.row_gradients import GroupedBags, RowGradients
from hybrid.embedding.worker.row_optimizers import OPTIMIZERS, StochasticRounding, Zeros
from hybrid.errors import NonFiniteError
from hybrid.primitives.huge_pages import large_pages, zeros_in_large_pages
from hybrid.primitives.key_hashes import next_random
from hybrid.updates.ticket import Purpose

# Bytes of rows, gradients and state in one block of an update. A block stays in the CPU cache.
_BLOCK_BYTES = 2 << 20
_MIN_REUSED_BYTES = 8 << 20  # for smaller tensors, the allocator reuses memory by itself


class ReusedBuffers:
    """Memory for large tensors, reused after the tensors are deleted.

    The first write to new memory costs more than a copy, since the system clears each page. The system may
    reclaim an unused buffer (``MADV_FREE``), and counts it as available memory. This class is thread-safe.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[mmap.mmap]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a CPU tensor with undefined values; a large tensor is in reused memory, if any is free."""
        count = math.prod(shape)
        if count * dtype.itemsize < _MIN_REUSED_BYTES:
            return torch.empty(*shape, dtype=dtype)
        # Powers of two, so that tensors of similar sizes use the same buffers. Unused pages take no memory.
        num_bytes = 1 << (count * dtype.itemsize - 1).bit_length()
        try:
            buffer = self._spare[num_bytes].pop()
        except IndexError:
            buffer = large_pages(num_bytes)
        view = memoryview(buffer)  # lives as long as the tensor and its views
        weakref.finalize(view, self._keep, buffer).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=count).view(*shape)

    def _keep(self, buffer: mmap.mmap) -> None:
        with suppress(OSError):  # without MADV_FREE, the process keeps the memory
            buffer.madvise(mmap.MADV_FREE)
        self._spare[len(buffer)].append(buffer)


class DistinctStepRows(NamedTuple):
    """The distinct rows that the lookups of a step read from one group of tables."""

    bags: Sequence[Bags]  # of each lookup
    # For each combination of pooling and use of offsets: indices into ``bags``, and their distinct rows.
    by_pooling: Sequence[tuple[list[int], GroupedBags]]

    def is_of(self, bags: Sequence[Bags]) -> bool:
        """Return whether these are the rows of ``bags``: the same objects, in the same order."""
        return [*map(id, self.bags)] == [*map(id, bags)]


class TableGroup:
    """The rows of several shards in one tensor, and their optimizer. The rows are zeros until initialized.

    Args:
        dtype: type of gradients and state; also of rows, unless they are in bfloat16.
        num_rows: number of rows of the tensor; a growing table reserves more rows than it uses.
        zeros: creates a tensor of zeros.

    Attributes:
        ids_end: upper bound of the ids; every id is less.
    """

    def __init__(
        self, group: ShardGroup, dtype: torch.dtype, num_rows: int, zeros: Zeros = zeros_in_large_pages
    ) -> None:
        self.group = group
        self.ids_end = num_rows
        is_rounded = group.has_bfloat16_rows
        self.weight_RD = zeros((num_rows, group.dim), torch.bfloat16 if is_rounded else dtype)
        rounding = StochasticRounding(dtype, self._rounding_seeds) if is_rounded else None
        self.optimizer = OPTIMIZERS[group.optimizer.name](group.optimizer, self.weight_RD, zeros, rounding)
        self._dtype = dtype
        self._seed = self._step = 0  # the seed of the run, and the step of the current update
        self._buffers = ReusedBuffers()
        self._zeros = zeros
        # Whether each row was updated since the last checkpoint or delta; None if no delta will be written.
        self._is_changed_R: Tensor | None = None

    def initialize(self, seed: int) -> dict[str, int]:
        """Fill the rows with initial values; return, by table, the number of rows from ``table.initial``."""
        self._seed = seed
        matches = {}
        for shard in self.group.shards:
            table, index, count = shard.table, shard.index, shard.count
            tensors = self.shard_tensors(shard)
            if not table.is_initial_by_position:
                fill_random_rows(tensors["weight"], table, seed, index, count)
            if table.initial:
                matches[table.name] = read_initial_rows(table, tensors, index, count)
        return matches

    def shard_tensors(self, shard: Shard, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return views of a shard's rows ("weight") and state in ``tensors``, or by default in the group."""
        start = self.group.starts[self.group.shards.index(shard)]
        of_group = self._tensors if tensors is None else tensors
        return {name: tensor[start : start + shard.num_rows] for name, tensor in of_group.items()}

    def load(self, checkpoint: Checkpoint) -> None:
        """Read the rows of all shards. Raise CheckpointError if the checkpoint is damaged or does not fit."""
        for shard in self.group.shards:
            checkpoint.load_rows(shard.table.name, shard.index, shard.count, self.shard_tensors(shard))

    def files(self, is_copied: bool) -> dict[str, Callable[[], Mapping[str, Tensor]]]:
        """Return, for each file of a checkpoint, a function that returns the tensors of the file's shard.

        The tensors are views of the group or, if ``is_copied``, of a copy that is made now.
        """
        tensors = self._copies(len(self.weight_RD)) if is_copied else self._tensors
        return {each.file_name: partial(self.shard_tensors, each, tensors) for each in self.group.shards}

    def track_changes(self) -> None:
        """Start to record which rows updates change; forget earlier changes."""
        self._is_changed_R = self._zeros((len(self.weight_RD),), torch.bool)

    def note_changes(self, rows: Tensor | slice) -> None:
        """Note that an update changes these rows of the group, if changes are tracked."""
        if self._is_changed_R is not None:
            self._is_changed_R[rows] = True

    def take_changes(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the changed rows for each file of a delta, and forget the changes.

        docs/checkpoints.md describes the files. :meth:`track_changes` must have been called.
        """
        assert self._is_changed_R is not None
        files = {}
        for shard, start in self.group.shard_starts:
            index_U = self._is_changed_R[start : start + shard.num_rows].nonzero().squeeze(1)
            files[shard.file_name] = {
                "rows": index_U * shard.count + shard.index,
                "weight": self.weight_RD[start : start + shard.num_rows].index_select(0, index_U),
            }
        self.track_changes()
        return files

    def _copies(self, num_rows: int) -> dict[str, Tensor]:
        rows = {name: tensor[:num_rows] for name, tensor in self._tensors.items()}
        return {name: self._buffers.empty(t.shape, t.dtype).copy_(t) for name, t in rows.items()}

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight_RD, **self.optimizer.state}

    def pool(self, bags: Bags, purpose: Purpose) -> tuple[Tensor, Bags]:
        """Pool bags like :func:`pool_and_record`. Rows in bfloat16 are widened before they are pooled."""
        is_pooled = bags.offsets is not None
        if is_pooled and not self.group.has_bfloat16_rows:
            return pool_and_record(self.weight_RD, bags)
        vectors_LD = self._buffers.empty((len(bags.ids_L), self.group.dim), self.weight_RD.dtype)
        torch.index_select(self.weight_RD, 0, bags.ids_L, out=vectors_LD)
        return pool_vectors(vectors_LD.to(self._dtype), bags) if is_pooled else (vectors_LD, bags)

    def find_distinct_rows(self, bags: Sequence[Bags]) -> DistinctStepRows:
        """Find the distinct rows of a step; :meth:`merge` sums their gradients.

        Args:
            bags: the bags of all lookups of the step, in the order in which their gradients are summed.
        """
        kinds: dict[tuple[str, bool], list[int]] = {}
        for index, each in enumerate(bags):
            kinds.setdefault((each.pooling, each.offsets is None), []).append(index)
        by_pooling = []
        for indices in kinds.values():
            of_kind = concatenate([bags[index] for index in indices])
            ids = kernels.group_ids(of_kind.ids_L.numpy(), self.ids_end)
            by_pooling.append((indices, GroupedBags(of_kind, ids, self._dtype)))
        return DistinctStepRows(bags, by_pooling)

    def merge(self, rows: DistinctStepRows, grads: Sequence[Tensor]) -> RowGradients:
        """Sum the gradients of a step by distinct row.

        Args:
            grads: for each element of ``rows.bags``, the gradient of its vectors, (bags, D).
        """
        merged = [
            RowGradients(bags, torch.cat([grads[i] for i in indices])) for indices, bags in rows.by_pooling
        ]
        if len(merged) == 1:
            return merged[0]
        # Add up the sums of all kinds, since a row may be read alone and in bags. There may be no row at all.
        empty = torch.empty(0, dtype=ids_dtype(self.ids_end))
        all_rows = self.find_distinct_rows([Bags(each.rows_U) for each in merged] or [Bags(empty)])
        no_rows = torch.empty(0, self.group.dim, dtype=self._dtype)
        return self.merge(all_rows, [each.sum_all() for each in merged] or [no_rows])

    def begin_update(self, gradients: RowGradients, step: int) -> RowGradients:
        """Begin a step's update; a growing table adds rows. Return the gradients of the rows to update."""
        self._step = step
        return gradients

    def _rounding_seeds(self, rows_U: Tensor) -> npt.NDArray[np.uint64]:
        """Return a random number for each row: a hash of run seed, step, table, and row of the table.

        So the numbers do not depend on the placement. For a growing table, the key replaces the row.
        """
        shards = self.group.shards
        salts_S = np.array([random_salt(self._seed, each.table.name) for each in shards], np.uint64)
        shard_U, keys_U = self._locate(rows_U.numpy())
        return next_random(next_random(salts_S + np.uint64(self._step))[shard_U] + keys_U.astype(np.uint64))

    def _locate(self, rows_U: Ints) -> tuple[Ints, Ints]:
        """Return, for each row of the group, the index of its shard and its row number in the table.

        In a growing table, the key replaces the row number.
        """
        layout = [(start, each.count, each.index) for each, start in self.group.shard_starts]
        starts_S, counts_S, indices_S = np.array(layout).T
        shard_U = np.searchsorted(starts_S, rows_U, side="right") - 1
        return shard_U, (rows_U - starts_S[shard_U]) * counts_S[shard_U] + indices_S[shard_U]

    def end_update(self, step: int) -> None:
        """End the update of a step. A growing table then removes rows."""

    def take_counts(self) -> dict[str, dict[str, int]]:
        """Return the counts of a growing table (see :meth:`GrowingGroup.take_counts`), else no counts."""
        return {}

    def blocks(self, stop: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """Split the range ``start:stop`` of rows into blocks that fit the CPU cache; return their bounds."""
        tensors = (self.weight_RD, self.weight_RD, *self.optimizer.state.values())
        size = max(1, _BLOCK_BYTES // max(1, sum(t[:1].nbytes for t in tensors)))
        return ((first, min(first + size, stop)) for first in range(start, stop, size))

    def blocks_without(self, idle: Collection[str]) -> Iterator[tuple[int, int]]:
        """Split the rows like :meth:`blocks`, but leave out the rows of the tables named in ``idle``."""
        if not idle:
            return self.blocks(len(self.weight_RD))
        starts = [(each, start) for each, start in self.group.shard_starts if each.table.name not in idle]
        return chain.from_iterable(self.blocks(start + each.num_rows, start) for each, start in starts)

    def describe(self, row: int) -> str:
        """Return text that names the table of a row of the group, and the row within the table."""
        (shard,), (row_of_table,) = self._locate(np.array([row]))
        return f"table {self.group.shards[shard].table.name}, row {row_of_table},"


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """The update of a step to all tables of a worker. The tables named in ``idle`` stay unchanged."""

    gradients: Sequence[tuple[TableGroup, RowGradients]]  # each updated group, and the gradients of its rows
    step: int
    factor: float
    check_finite: bool
    # Names of tables that stay unchanged in this step, although their updates otherwise change all rows.
    idle: frozenset[str] = frozenset()

    def squared_norm(self) -> float:
        """Return the squared norm of all gradients.

        Raise NonFiniteError if a gradient is not finite and ``check_finite`` is set; no row has changed then.
        """
        for group, gradients in self.gradients:
            total = float(gradients.sum_all().sum())
            self._check(group, gradients, 0, len(gradients.rows_U), total)
        norms = (torch.linalg.vector_norm(g.sum_all(), dtype=torch.float64) for _, g in self.gradients)
        return sum(float(norm) ** 2 for norm in norms)

    def apply(self, scale: float) -> None:
        """Update the rows in blocks, with gradients times ``scale`` and learning rates times ``self.factor``.

        Raises:
            NonFiniteError: a gradient is not finite, and ``check_finite`` is set. Some rows may already be
                updated, so the tables are inconsistent.
        """
        for group, of_ids in self.gradients:
            steps_all = group.group.optimizer.steps_all_rows
            gradients = group.begin_update(of_ids, self.step)
            rows_U = gradients.rows_U
            blocks = group.blocks_without(self.idle) if steps_all else group.blocks(len(rows_U))
            group.note_changes(rows_U)
            for first, last in blocks:
                begin, end = first, last  # of the touched rows
                if steps_all:
                    ends = torch.tensor([first, last], dtype=rows_U.dtype)
                    begin, end = torch.searchsorted(rows_U, ends).tolist()
                    group.note_changes(slice(first, last))
                    grad_UD, total = gradients.sum_block(begin, end, scale)
                    group.optimizer.step_all(first, last, rows_U[begin:end], grad_UD, self.factor)
                else:
                    total = group.optimizer.apply(gradients, begin, end, scale, self.factor)
                self._check(group, gradients, begin, end, total)
            group.end_update(self.step)

    def _check(self, group: TableGroup, gradients: RowGradients, first: int, last: int, total: float) -> None:
        if not self.check_finite or math.isfinite(total):
            return
        rows_U = gradients.rows_U[first:last]
        grad_UD = gradients.sum_block(first, last)[0]
        wrong_U = ~grad_UD.isfinite().all(1)
        if wrong_U.any():  # otherwise, the sum of finite values has overflowed
            row = group.describe(int(rows_U[wrong_U.nonzero()[0]]))
            raise NonFiniteError(f"step {self.step}: the gradient of {row} is not finite")
