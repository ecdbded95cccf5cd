"""The rows of a worker by group, and the update of a step."""

import bisect
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_manifest import shard_file
from hybrid.checkpoint.reused_buffers import ReusedBuffers
from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags, concatenate, ids_dtype
from hybrid.embedding.placement import Shard, ShardGroup
from hybrid.embedding.pretrained_by_position import read_rows
from hybrid.embedding.row_gradients import RowGradients
from hybrid.embedding.worker.initial_rows import initialise_rows
from hybrid.embedding.worker.pre_update_rows import PreUpdateRows
from hybrid.embedding.worker.row_optimizers import OPTIMIZERS, Frozen, copy
from hybrid.errors import NonFiniteError
from hybrid.primitives.huge_pages import zeros_in_large_pages

# Rows, gradients and state of one block of an update, which stay in the cache between gather and scatter.
_BLOCK_BYTES = 2 << 20


class TableGroup:
    """The rows of several shards in one tensor, zeros at first, and their optimizer."""

    def __init__(self, group: ShardGroup, dtype: torch.dtype) -> None:
        self.group = group
        self.weight_RD = zeros_in_large_pages((group.num_rows, group.dim), dtype)
        self.optimizer = OPTIMIZERS[group.optimizer.name](group.optimizer, self.weight_RD)
        self._for_copies = ReusedBuffers()

    def initialise(self, seed: int) -> None:
        """Fill the rows with their initial values."""
        for shard in self.group.shards:
            table, rows_RD = shard.table, self.shard_tensors(shard)["weight"]
            if table.initial and not table.keys:
                read_rows(table.initial, rows_RD, shard.index, shard.count)
                continue
            scale = table.init_scale
            initialise_rows(rows_RD, seed, table.name, scale, shard.index, shard.count, table.init)
            if table.initial:
                # A late import: it needs packages that other tables do not.
                from hybrid.embedding.pretrained_by_key import read_rows_by_value

                read_rows_by_value(table, rows_RD, shard.index, shard.count)

    @property
    def is_frozen(self) -> bool:
        """Whether rows are never updated."""
        return isinstance(self.optimizer, Frozen)

    @property
    def steps_all_rows(self) -> bool:
        """Whether a step changes all rows, touched or not."""
        return self.group.optimizer.steps_all_rows

    def shard_tensors(self, shard: Shard) -> dict[str, Tensor]:
        """Return the rows of a shard ("weight") and their optimizer state, as views of the group."""
        return self._of_shard(shard, self._tensors)

    def files(self, is_copied: bool) -> dict[str, dict[str, Tensor]]:
        """Return the checkpoint tensors of each shard, by file: views of the group, or of a copy."""
        tensors = self._tensors
        if is_copied:
            tensors = {name: self._for_copies.copy(tensor) for name, tensor in tensors.items()}
        return {
            shard_file(shard.table.name, shard.index, shard.count): self._of_shard(shard, tensors)
            for shard in self.group.shards
        }

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight_RD, **self.optimizer.state}

    def _of_shard(self, shard: Shard, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        start = self.group.starts[self.group.shards.index(shard)]
        return {name: tensor[start : start + shard.num_rows] for name, tensor in tensors.items()}

    def merge(self, parts: list[tuple[Bags, Tensor]]) -> RowGradients:
        """Merge the gradients of ``parts`` into those of distinct rows, summed in the order of the parts."""
        if not parts:
            empty_L = torch.empty(0, dtype=ids_dtype(self.group.num_rows))
            return self._gradients(Bags(empty_L), self.weight_RD[:0])
        kinds: dict[tuple[str, bool], list[tuple[Bags, Tensor]]] = {}
        for bags, grad_BD in parts:
            kinds.setdefault((bags.pooling, bags.offsets is None), []).append((bags, grad_BD))
        merged = [self._merge_alike(alike) for alike in kinds.values()]
        if len(merged) == 1:
            return merged[0]
        # Rows that were read one by one, and pooled in bags.
        return self._merge_alike([(Bags(gradients.rows_U), gradients.whole()) for gradients in merged])

    def _merge_alike(self, parts: list[tuple[Bags, Tensor]]) -> RowGradients:
        bags = concatenate([b for b, _ in parts])
        grad_BD = parts[0][1] if len(parts) == 1 else torch.cat([g for _, g in parts])
        return self._gradients(bags, grad_BD)

    def _gradients(self, bags: Bags, grad_BD: Tensor) -> RowGradients:
        return RowGradients(bags, grad_BD, kernels.group_ids(bags.ids_L.numpy(), self.group.num_rows))

    def blocks(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Yield blocks of ``num_rows`` rows that fit the processor's cache with gradients and state."""
        tensors = (self.weight_RD, self.weight_RD, *self.optimizer.state.values())
        size = max(1, _BLOCK_BYTES // max(1, sum(t[:1].nbytes for t in tensors)))
        return ((first, min(first + size, num_rows)) for first in range(0, num_rows, size))

    def table_of(self, row: int) -> tuple[str, int]:
        """Return the table, and the row within it, of a row of the group."""
        number = bisect.bisect_right(self.group.starts, row) - 1
        shard = self.group.shards[number]
        return shard.table.name, (row - self.group.starts[number]) * shard.count + shard.index


class TableUpdate:
    """One step's merged gradients of all tables of a worker.

    Args:
        parts: by index, groups with the gradients of their rows.
        step: step of the gradients.
        factor: factor of the learning rates.
        check_finite: whether a gradient that is not finite is an error.
        previous: receives the overwritten rows, or None.
    """

    def __init__(
        self,
        parts: Mapping[int, tuple[TableGroup, RowGradients]],
        step: int,
        factor: float,
        check_finite: bool,
        previous: PreUpdateRows | None,
    ) -> None:
        self._parts = parts
        self._step = step
        self._factor = factor
        self._check_finite = check_finite
        self._previous = previous

    def squared_norm(self) -> float:
        """Return the squared norm of all gradients.

        Raises:
            NonFiniteError: see :meth:`apply`.
        """
        for group, gradients in self._parts.values():
            grad_UD = gradients.whole()
            self._check(group, gradients.rows_U, grad_UD, float(grad_UD.sum()))
        norms = (torch.linalg.vector_norm(g.whole(), dtype=torch.float64) for _, g in self._parts.values())
        return sum(float(norm) ** 2 for norm in norms)

    def apply(self, scale: float) -> None:
        """Update the rows with the gradients times ``scale``, block by block.

        Raises:
            NonFiniteError: a gradient is not finite, and that is an error. Rows before it are then updated,
                so that the tables are inconsistent.
        """
        for number, (group, gradients) in self._parts.items():
            steps_all, rows_U = group.steps_all_rows, gradients.rows_U
            num_rows = len(group.weight_RD) if steps_all else len(rows_U)
            previous_UD = None
            if self._previous is not None:
                changed_U = torch.arange(num_rows, dtype=rows_U.dtype) if steps_all else rows_U
                previous_UD = self._previous.allocate(number, changed_U, group.weight_RD)
            for first, last in group.blocks(num_rows):
                begin, end = first, last
                if steps_all:
                    ends = torch.tensor([first, last], dtype=rows_U.dtype)
                    begin, end = torch.searchsorted(rows_U, ends).tolist()
                grad_UD, total = gradients.block(begin, end)
                self._check(group, rows_U[begin:end], grad_UD, total)
                if scale != 1.0:
                    grad_UD.mul_(scale)
                if previous_UD is not None:
                    copy(group.weight_RD, changed_U[first:last], previous_UD[first:last])
                if steps_all:
                    group.optimizer.step_all(first, last, rows_U[begin:end], grad_UD, self._factor)
                else:
                    group.optimizer.step(rows_U[begin:end], grad_UD, self._factor)

    def _check(self, group: TableGroup, rows_U: Tensor, grad_UD: Tensor, total: float) -> None:
        if not self._check_finite or math.isfinite(total):
            return
        wrong_U = ~grad_UD.isfinite().all(1)
        if wrong_U.any():  # else the sum of finite values has overflowed
            table, row = group.table_of(int(rows_U[wrong_U.nonzero()[0]]))
            raise NonFiniteError(
                f"step {self._step}: the gradient of table {table}, row {row}, is not finite"
            )
