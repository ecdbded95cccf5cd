"""The worker's side: the tables it holds, looked up by trainers and updated step by step."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.futures import Future

from hybrid.checkpoint.reader import Checkpoint
from hybrid.embedding.bags import Bags, Item, pool, pool_recorded
from hybrid.embedding.placement import Placement, Shard
from hybrid.embedding.worker.groups import TableGroup, TableUpdate
from hybrid.errors import ClusterError
from hybrid.hosting.barrier import UpdateBarrier
from hybrid.hosting.hosted import Hosted
from hybrid.steps.rules import UpdateRules
from hybrid.steps.ticket import Purpose, Ticket

# The items of one trainer's lookup, each with the gradient of its result.
Gradients: TypeAlias = list[tuple[int, Bags, Tensor]]


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

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Future[list[Tensor]]:
        """:meth:`receive`, then :meth:`lookup`: what a trainer that looks ahead sends each step."""
        self.receive(ticket, grads, updates_here=True)
        return self.lookup(next_ticket, items)

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
