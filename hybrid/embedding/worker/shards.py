"""The worker's side: the tables it holds, looked up by trainers and updated step by step."""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.futures import Future

from hybrid.checkpoint.files import shard_file
from hybrid.checkpoint.reader import Checkpoint
from hybrid.checkpoint.reused_memory import ReusedMemory
from hybrid.embedding.bags import Bags, Item, concatenate, pool, pool_recorded
from hybrid.embedding.gradients import RowGradients
from hybrid.embedding.placement import Placement, Shard, ShardGroup
from hybrid.embedding.worker.initial import initialise_rows
from hybrid.embedding.worker.optimizers import OPTIMIZERS
from hybrid.errors import ClusterError, NonFiniteError
from hybrid.hosting.barrier import UpdateBarrier
from hybrid.hosting.hosted import Hosted
from hybrid.memory import zeros_in_large_pages
from hybrid.steps.rules import UpdateRules
from hybrid.steps.ticket import Purpose, Ticket

# The items of one trainer's lookup, each with the gradient of its result.
Gradients: TypeAlias = list[tuple[int, Bags, Tensor]]

# Rows, gradients and state of one block of an update: what stays in the cache between gather and scatter.
_BLOCK_BYTES = 2 << 20


class TableGroup:
    """The rows of several shards in one tensor, with their optimizer; rows hold nothing yet."""

    def __init__(self, group: ShardGroup, dtype: torch.dtype) -> None:
        self.group = group
        self.weight_RD = zeros_in_large_pages((group.num_rows, group.dim), dtype)
        self.optimizer = OPTIMIZERS[group.optimizer.name](group.optimizer, self.weight_RD)
        self._for_copies = ReusedMemory()

    def initialise(self, seed: int) -> None:
        """Fill the rows with their initial values."""
        for shard in self.group.shards:
            table, rows_RD = shard.table, self.shard_tensors(shard)["weight"]
            initialise_rows(rows_RD, seed, table.name, table.init_scale, shard.index, shard.count)

    def shard_tensors(self, shard: Shard) -> dict[str, Tensor]:
        """The rows of one shard ("weight") and their optimizer state, as views into the group."""
        return self._of_shard(shard, self._tensors)

    def files(self, is_copied: bool) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint has of each shard, by file: views into the group, or into a copy of it."""
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
        """The gradients of the distinct rows that ``parts`` touch, summed in the order of ``parts``."""
        kinds: dict[tuple[str, bool], list[tuple[Bags, Tensor]]] = {}
        for bags, grad_BD in parts:
            kinds.setdefault((bags.pooling, bags.offsets is None), []).append((bags, grad_BD))
        merged = [self._merge_alike(same) for same in kinds.values()]
        if len(merged) == 1:
            return merged[0]
        # Rows read both one by one and pooled.
        return self._merge_alike([(Bags(gradients.rows_U), gradients.whole()) for gradients in merged])

    def _merge_alike(self, parts: list[tuple[Bags, Tensor]]) -> RowGradients:
        bags = concatenate([b for b, _ in parts])
        grad_BD = parts[0][1] if len(parts) == 1 else torch.cat([g for _, g in parts])
        return RowGradients(bags, grad_BD, self.group.num_rows)

    def blocks(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Parts of ``num_rows`` touched rows which, with gradients and state, fit the processor's cache."""
        tensors = (self.weight_RD, self.weight_RD, *self.optimizer.state.values())
        size = max(1, _BLOCK_BYTES // max(1, sum(t[:1].nbytes for t in tensors)))
        return ((first, min(first + size, num_rows)) for first in range(0, num_rows, size))

    def table_of(self, row: int) -> tuple[str, int]:
        """The table, and the row within it, that a row of the group is."""
        number = bisect.bisect_right(self.group.starts, row) - 1
        shard = self.group.shards[number]
        return shard.table.name, (row - self.group.starts[number]) * shard.count + shard.index


class TableUpdate:
    """One step's merged gradients of all tables of a worker.

    Args:
        parts: each group with the gradients of its rows.
        step: whose gradients they are.
        factor: of the learning rates.
        check_finite: whether a gradient that is not finite is an error.
    """

    def __init__(
        self, parts: list[tuple[TableGroup, RowGradients]], step: int, factor: float, check_finite: bool
    ) -> None:
        self._parts = parts
        self._step = step
        self._factor = factor
        self._check_finite = check_finite

    def squared_norm(self) -> float:
        """Of all gradients.

        Raises:
            NonFiniteError: see :meth:`apply`.
        """
        for group, gradients in self._parts:
            grad_UD = gradients.whole()
            self._check(group, gradients.rows_U, grad_UD, float(grad_UD.sum()))
        norms = (torch.linalg.vector_norm(g.whole(), dtype=torch.float64) for _, g in self._parts)
        return sum(float(norm) ** 2 for norm in norms)

    def apply(self, scale: float) -> None:
        """Update the rows with the gradients times ``scale``, block by block.

        Raises:
            NonFiniteError: a gradient is not finite where that is an error; names table and row. Rows
                before it are updated then, and the tables of no further use.
        """
        for group, gradients in self._parts:
            for first, last in group.blocks(len(gradients.rows_U)):
                grad_UD, total = gradients.block(first, last)
                rows_U = gradients.rows_U[first:last]
                self._check(group, rows_U, grad_UD, total)
                group.optimizer.step(rows_U, grad_UD if scale == 1.0 else grad_UD.mul_(scale), self._factor)

    def _check(self, group: TableGroup, rows_U: Tensor, grad_UD: Tensor, total: float) -> None:
        if not self._check_finite or math.isfinite(total):
            return
        wrong_U = ~grad_UD.isfinite().all(1)
        if wrong_U.any():  # else the sum of finite values has overflown
            table, row = group.table_of(int(rows_U[wrong_U.nonzero()[0]]))
            raise NonFiniteError(
                f"step {self._step}: the gradient of table {table}, row {row}, is not finite"
            )


class TableShards(Hosted):
    """All tables of one worker. Created by the master as a ``RemoteModule``; trainers look rows up.

    Fill them before use: ``initialise`` for a new model, ``load`` for one out of a checkpoint.

    Args:
        placement: where every table lies.
        worker: index of this worker.
        rules: how gradients become updates.
        dtype: of rows and optimizer state.
        wire_dtype: of vectors that are answered for training, and of their gradients; None for ``dtype``.
    """

    def __init__(
        self,
        placement: Placement,
        worker: int,
        rules: UpdateRules,
        dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._wire_dtype = wire_dtype or dtype
        self.groups = [TableGroup(group, dtype) for group in placement.groups(worker)]
        self._rules = rules
        # Autograd records a lookup only if one of its inputs requires a gradient.
        self._anchor = torch.zeros(0, dtype=dtype, requires_grad=True)
        # What was looked up ahead, until its gradients come: by trainer, step and part.
        self._prefetched: dict[tuple[int, int, int], tuple[list[Item], int]] = {}
        self._worker = worker
        self.barrier = UpdateBarrier[Gradients](rules, self._merge, self.clock)

    def initialise(self, seed: int) -> None:
        """Fill every table with its initial rows, which depend on ``seed`` and the table's name alone."""
        for group in self.groups:
            group.initialise(seed)

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        """Pooled vectors, one tensor an item, once the tables have seen as many updates as the ticket says.

        For ``Purpose.TRAIN`` the results carry gradients: the backward pass must reach each lookup exactly
        once, and hands its gradients to the update of the ticket's step. For ``Purpose.PREFETCH`` they are
        values, and :meth:`receive` takes their gradients.
        """
        return self.barrier.when(ticket, lambda: self.forward(ticket, items), ticket.flow(self._worker))

    def forward(self, ticket: Ticket, items: Sequence[Item]) -> list[Tensor]:
        """As :meth:`lookup`, against the rows as they are now."""
        if ticket.purpose is Purpose.PREDICT:
            return [pool(self.groups[group].weight_RD, bags) for group, bags in items]
        with self.clock.span("pool", ticket.step, flow=ticket.flow(self._worker)):
            if ticket.purpose is Purpose.TRAIN:
                return list(_Lookup.apply(self._anchor, self, ticket, items))  # type: ignore[no-untyped-call]
            version = self.version
            pooled, recorded = self.pool_recorded(items)
            self._prefetched[ticket.trainer, ticket.step, ticket.part] = recorded, version
            return pooled

    def pool_recorded(self, items: Sequence[Item]) -> tuple[list[Tensor], list[Item]]:
        """Pooled vectors, and the items with what their gradients will need."""
        pooled, recorded = [], []
        for group, bags in items:
            vectors_BD, bags_then = pool_recorded(self.groups[group].weight_RD, bags)
            pooled.append(vectors_BD.to(self._wire_dtype))
            recorded.append((group, bags_then))
        return pooled, recorded

    def receive(self, ticket: Ticket, grads: Sequence[Tensor], *, updates_here: bool = False) -> None:
        """Take the gradients of a prefetched lookup's vectors, in their order.

        Args:
            updates_here: see :meth:`UpdateBarrier.contribute`.
        """
        key = (ticket.trainer, ticket.step, ticket.part)
        if key not in self._prefetched:
            raise ClusterError(f"trainer {ticket.trainer} sent gradients of step {ticket.step} twice")
        items, read_at = self._prefetched.pop(key)
        self.contribute(ticket, items, grads, read_at, updates_here=updates_here)

    def contribute(
        self,
        ticket: Ticket,
        items: Sequence[Item],
        grads: Sequence[Tensor],
        read_at: int,
        *,
        updates_here: bool = False,
    ) -> None:
        """Hand one trainer's gradients of one lookup to the update barrier.

        Args:
            read_at, updates_here: see :meth:`UpdateBarrier.contribute`.

        Raises:
            ClusterError: they are not of the vectors that were looked up.
        """
        for (group, bags), grad in zip(items, grads, strict=True):
            if grad.shape != (bags.num_bags, self.groups[group].group.dim):
                raise ClusterError(
                    f"trainer {ticket.trainer} sent gradients of shape {list(grad.shape)} for "
                    f"{bags.num_bags} vectors of {self.groups[group].group.dim}"
                )
        gradients = [
            (group, bags, grad.to(self.groups[group].weight_RD.dtype))
            for (group, bags), grad in zip(items, grads, strict=True)
        ]
        self.barrier.contribute(ticket, gradients, read_at, updates_here=updates_here)

    def shard_tensors(self, shard: Shard) -> dict[str, Tensor]:
        """The rows and optimizer state of one shard, as views."""
        group = next(g for g in self.groups if shard in g.group.shards)
        return group.shard_tensors(shard)

    def load(self, folder: Path, step: int) -> None:
        """Read every shard from a checkpoint and go on as after ``step`` steps."""
        checkpoint = Checkpoint.open(folder)
        for shard in (shard for group in self.groups for shard in group.group.shards):
            checkpoint.load_rows(shard.table.name, shard.index, shard.count, self.shard_tensors(shard))
        self._prefetched.clear()
        self.barrier.restart(step)

    def _files(self, is_copied: bool) -> dict[str, dict[str, Tensor]]:
        return {name: of_file for g in self.groups for name, of_file in g.files(is_copied).items()}

    def _merge(self, step: int, contributions: list[Gradients]) -> TableUpdate:
        parts: dict[int, list[tuple[Bags, Tensor]]] = {}
        for gradients in contributions:
            for group, bags, grad_BD in gradients:
                parts.setdefault(group, []).append((bags, grad_BD))
        merged = [(self.groups[g], self.groups[g].merge(group_parts)) for g, group_parts in parts.items()]
        return TableUpdate(merged, step, self._rules.schedule.factor(step), self._rules.check_finite)


class _Lookup(torch.autograd.Function):
    """Pooling whose backward hands the gradients to the update barrier, without a sparse tensor."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        anchor: Tensor,
        shards: TableShards,
        ticket: Ticket,
        items: Sequence[Item],
    ) -> tuple[Tensor, ...]:
        read_at = shards.version
        pooled, recorded = shards.pool_recorded(items)
        ctx.arguments = shards, ticket, recorded, read_at  # type: ignore[attr-defined]
        return tuple(pooled)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[None, ...]:
        shards, ticket, recorded, read_at = ctx.arguments  # type: ignore[attr-defined]
        shards.contribute(ticket, recorded, grads, read_at)
        return None, None, None, None
