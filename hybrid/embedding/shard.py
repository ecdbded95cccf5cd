"""The worker's side: the tables it holds, looked up by trainers and updated step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.futures import Future

from hybrid.checkpoint import Checkpoint, shard_file, write_tensors
from hybrid.embedding.kernels import Bags, concatenate, initialise_rows, pool, row_gradients
from hybrid.embedding.optimizer import OPTIMIZERS
from hybrid.embedding.placement import Group, Placement, Shard
from hybrid.embedding.routes import Item
from hybrid.embedding.update import UpdateBarrier, UpdateMode


class Ticket(NamedTuple):
    """Who looks up, and when.

    Attributes:
        trainer: index of the trainer.
        step: the lookup sees the updates of all steps before this one.
        train: whether gradients will follow; False for evaluation.
    """

    trainer: int
    step: int
    train: bool


# The items of one trainer's lookup, each with the gradient of its result.
Gradients: TypeAlias = list[tuple[int, Bags, Tensor]]


class TableGroup:
    """The rows of several shards in one tensor, with their optimizer; rows hold nothing yet."""

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        self.group = group
        self.weight_RD = torch.empty(group.num_rows, group.dim, dtype=dtype)
        self.optimizer = OPTIMIZERS[group.optimizer.name](group.optimizer, self.weight_RD)

    def initialise(self, seed: int) -> None:
        """Fill the rows with their initial values."""
        for shard in self.group.shards:
            table, rows_RD = shard.table, self.shard_tensors(shard)["weight"]
            initialise_rows(rows_RD, seed, table.name, table.init_scale, shard.index, shard.count)

    def shard_tensors(self, shard: Shard) -> dict[str, Tensor]:
        """The rows of one shard ("weight") and their optimizer state, as views into the group."""
        start = self.group.starts[self.group.shards.index(shard)]
        named = {"weight": self.weight_RD, **self.optimizer.state}
        return {name: tensor[start : start + shard.num_rows] for name, tensor in named.items()}

    def update(self, parts: list[tuple[Bags, Tensor]]) -> None:
        """One optimizer step with the gradients of all ``parts``, in their order."""
        kinds: dict[tuple[str, bool], list[tuple[Bags, Tensor]]] = {}
        for bags, grad_BD in parts:
            kinds.setdefault((bags.pooling, bags.offsets is None), []).append((bags, grad_BD))
        merged = []
        for same in kinds.values():
            bags = concatenate([b for b, _ in same])
            grad_BD = same[0][1] if len(same) == 1 else torch.cat([g for _, g in same])
            merged.append(row_gradients(bags, grad_BD, self.weight_RD))
        if len(merged) > 1:  # rows read both one by one and pooled
            rows = Bags(torch.cat([rows_U for rows_U, _ in merged]))
            merged = [row_gradients(rows, torch.cat([grad_UD for _, grad_UD in merged]), self.weight_RD)]
        self.optimizer.step(*merged[0])


class TableShards(nn.Module):
    """All tables of one worker. Created by the master as a ``RemoteModule``; trainers look rows up.

    Fill them before use: ``initialise`` for a new model, ``load`` for one out of a checkpoint.

    Args:
        placement: where every table lies.
        worker: index of this worker.
        num_trainers, mode, timeout_seconds: see :class:`UpdateBarrier`.
    """

    def __init__(
        self,
        placement: Placement,
        worker: int,
        num_trainers: int,
        mode: UpdateMode,
        timeout_seconds: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.groups = [TableGroup(group, dtype) for group in placement.groups(worker)]
        # Autograd records a lookup only if one of its inputs requires a gradient.
        self._anchor = torch.zeros(0, dtype=dtype, requires_grad=True)
        self._barrier: UpdateBarrier[Gradients] = UpdateBarrier(
            num_trainers, self._update, timeout_seconds, mode
        )

    def initialise(self, seed: int) -> None:
        """Fill every table with its initial rows, which depend on ``seed`` and the table's name alone."""
        for group in self.groups:
            group.initialise(seed)

    @property
    def version(self) -> int:
        """How many updates the tables have seen."""
        return self._barrier.version

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        """Pooled vectors, one tensor an item, once the tables have seen all steps before the ticket's.

        With ``ticket.train`` the results carry gradients: the backward pass must reach each lookup of
        each step exactly once, and hands its gradients to the update of that step.
        """
        items = [(group, Bags(*bags)) for group, bags in items]
        return self._barrier.when(ticket.step, lambda: self.forward(ticket, items), ticket.trainer)

    def forward(self, ticket: Ticket, items: Sequence[Item]) -> list[Tensor]:
        """As :meth:`lookup`, against the rows as they are now."""
        if not ticket.train:
            return self.pool(items)
        return list(_Lookup.apply(self._anchor, self, ticket, items))  # type: ignore[no-untyped-call]

    def pool(self, items: Sequence[Item]) -> list[Tensor]:
        return [pool(self.groups[group].weight_RD, bags) for group, bags in items]

    def contribute(self, ticket: Ticket, gradients: Gradients) -> None:
        """Hand one trainer's gradients of one step to the update barrier."""
        self._barrier.contribute(ticket.trainer, ticket.step, gradients)

    def shard_tensors(self, shard: Shard) -> dict[str, Tensor]:
        """The rows and optimizer state of one shard, as views."""
        group = next(g for g in self.groups if shard in g.group.shards)
        return group.shard_tensors(shard)

    def save(self, folder: Path) -> None:
        """Write each shard, with all updates that are under way, as a file of ``folder``."""
        self._barrier.drain()
        for shard in self._shards():
            name = shard_file(shard.table.name, shard.index, shard.count)
            write_tensors(folder, name, self.shard_tensors(shard))

    def load(self, folder: Path, step: int) -> None:
        """Read every shard from a checkpoint and go on as after ``step`` steps."""
        checkpoint = Checkpoint.open(folder)
        for shard in self._shards():
            checkpoint.load_rows(shard.table.name, shard.index, shard.count, self.shard_tensors(shard))
        self._barrier.restart(step)

    def _shards(self) -> list[Shard]:
        return [shard for group in self.groups for shard in group.group.shards]

    def close(self) -> None:
        """End the background thread."""
        self._barrier.close()

    def _update(self, contributions: list[Gradients]) -> None:
        parts: dict[int, list[tuple[Bags, Tensor]]] = {}
        for gradients in contributions:
            for group, bags, grad_BD in gradients:
                parts.setdefault(group, []).append((bags, grad_BD))
        for group, group_parts in parts.items():
            self.groups[group].update(group_parts)


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
        ctx.shards, ctx.ticket, ctx.items = shards, ticket, items  # type: ignore[attr-defined]
        return tuple(shards.pool(items))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[None, ...]:
        shards, ticket, items = ctx.shards, ctx.ticket, ctx.items  # type: ignore[attr-defined]
        shards.contribute(ticket, [(g, bags, grad) for (g, bags), grad in zip(items, grads, strict=True)])
        return None, None, None, None
