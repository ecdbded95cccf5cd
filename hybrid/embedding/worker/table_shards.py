"""The tables of a worker: lookups of trainers, gradients of steps, and checkpoints.

The gradients of a lookup of a custom loop can end with **marks**: one number for each bag and each table. The
number is 1 if the loss uses the bag or table. If it is 0, the update leaves out the bag or table.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor
from torch.futures import Future

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.embedding.bags import Bags, Item, has_marks
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_source import LookupRequest, TableSource
from hybrid.embedding.worker.growing_group import GrowingGroup
from hybrid.embedding.worker.table_groups import DistinctStepRows, TableGroup, TableUpdate
from hybrid.errors import CheckpointError, ClusterError
from hybrid.storage.remote_path import StoragePath
from hybrid.updates.barrier import UpdateBarrier
from hybrid.updates.hosted_module import HostedModule
from hybrid.updates.ticket import LookupKey, Purpose, Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

# Pooling more ids takes longer than waking a thread.
_LARGE_LOOKUP_IDS = 10_000

# A trainer's gradients for one lookup: the items of the lookup, each with the gradient of its vectors, and
# the names of idle tables, which stay unchanged because the loss does not use them.
Gradients: TypeAlias = tuple[list[tuple[int, Bags, Tensor]], frozenset[str]]


class TableShards(HostedModule, TableSource):
    """All table shards of one worker. The master creates them as a ``RemoteModule``; trainers look them up.

    Call ``initialize`` for a new model, or ``load`` for a checkpoint, before use.

    Args:
        dtype: type of rows, unless they are in bfloat16, and of optimizer state.
        wire_dtype: type in which vectors for training and their gradients are sent. If None, rows are sent as
            they are stored, and pooled vectors and gradients in ``dtype``.
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
        self._dtype = dtype
        self._wire_dtype = wire_dtype or dtype
        self.groups = [
            GrowingGroup(group, dtype)
            if group.shards[0].table.growth
            else TableGroup(group, dtype, group.num_rows)
            for group in placement.groups(worker)
        ]
        self._tables = [*placement.shapes]
        self._rules = rules
        # Autograd records a function only if one of its inputs requires a gradient.
        self._anchor = torch.zeros(0, dtype=dtype, requires_grad=True)
        # Items of prefetched lookups that wait for gradients; empty until a lookup runs.
        self._prefetched: dict[LookupKey, list[Item]] = {}
        self._distinct_rows: dict[int, DistinctStepRows] = {}  # rows of the next update, by group
        self._distinct_rows_lock = threading.Lock()
        is_ahead = rules.mode is UpdateMode.LOOKAHEAD
        self.barrier = UpdateBarrier[Gradients](
            rules, self._merge, self.clock, self._find_distinct_rows if is_ahead else None
        )

    def initialize(self, seed: int) -> dict[str, int]:
        """Fill the tables of a new model with rows of ``table.initial``; fill other rows by ``table.init``.

        Returns:
            For each table with ``initial``, the number of rows on this worker that were read from it. Row 0
            is not counted, unless the table grows.
        """
        return {name: number for group in self.groups for name, number in group.initialize(seed).items()}

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        is_large = sum(bags.ids_L.numel() for _, bags in items) > _LARGE_LOOKUP_IDS
        recorded: list[Item] = []
        if ticket.purpose is Purpose.PREFETCH:
            # The last request gets the gradients, even if an abandoned request of the same step runs later.
            self._prefetched[ticket.key] = recorded
        work = partial(self._respond, ticket, items, recorded)
        return self.barrier.run_when_ready(ticket, work, is_large=is_large)

    def _respond(self, ticket: Ticket, items: Sequence[Item], recorded: list[Item]) -> list[Tensor]:
        if ticket.purpose is Purpose.PREDICT:
            return [self._as_stored(self.groups[g].pool(bags, ticket.purpose)[0]) for g, bags in items]
        with self.clock.span("pool", ticket.step):
            if ticket.purpose is Purpose.TRAIN:
                return [*_Pool.apply(self._anchor, self, ticket, items)]  # type: ignore[no-untyped-call]
            pooled, recorded_items = self.pool_and_record(items, ticket.purpose)
            recorded.extend(recorded_items)
            # A prefetch needs no response for the marks, since autograd does not compute their gradient.
            return [*pooled, torch.empty(0, dtype=self._wire_dtype)] if has_marks(items) else pooled

    def pool_and_record(self, items: Sequence[Item], purpose: Purpose) -> tuple[list[Tensor], list[Item]]:
        """Return each item's vectors, and the items for the backward pass. Ignore the item :data:`MARKS`."""
        pooled = []
        recorded = []
        for group, bags in items[:-1] if has_marks(items) else items:
            vectors_BD, recorded_bags = self.groups[group].pool(bags, purpose)
            is_rounded = self._wire_dtype is not self._dtype
            pooled.append(vectors_BD.to(self._wire_dtype) if is_rounded else self._as_stored(vectors_BD))
            recorded.append((group, recorded_bags))
        return pooled, recorded

    def _as_stored(self, vectors_BD: Tensor) -> Tensor:
        """Return vectors unrounded: rows in bfloat16 as int16, or as float64 if ``dtype`` is float64.

        For bfloat16, trainers would round the gradients to bfloat16. For int16, trainers send the gradients
        unrounded, but widen the rows only to float32.
        """
        if vectors_BD.dtype is self._dtype:
            return vectors_BD
        return vectors_BD.to(self._dtype) if self._dtype is torch.float64 else vectors_BD.view(torch.int16)

    def empty_marks(self, items: Sequence[Item]) -> Tensor:
        """Return zeros in the shape of marks: for each bag of ``items``, then for each table of the run."""
        size = sum(bags.num_bags for _, bags in items) + len(self._tables)
        return torch.zeros((), dtype=self._wire_dtype).expand(size)

    def take_counts(self) -> dict[str, dict[str, int]]:
        """Return the result of :meth:`GrowingGroup.take_counts` for all growing tables, by table name."""
        return {name: counts for group in self.groups for name, counts in group.take_counts().items()}

    def send_gradients(
        self, ticket: Ticket, grads: Sequence[Tensor], next_lookup: LookupRequest | None = None
    ) -> Future[list[Tensor]]:
        items = self._prefetched.pop(ticket.key, None)
        if items is None:
            raise ClusterError(f"trainer {ticket.trainer} sent gradients of step {ticket.step} twice")
        response: Future[list[Tensor]]
        if next_lookup is None:
            response = Future()
            response.set_result([])
        else:  # before the gradients, since the update that they may complete runs the waiting lookups
            response = self.lookup(next_lookup.ticket, next_lookup.items)
        # The trainer that sends a lookup waits for the update anyway, so this thread may apply the update.
        self.contribute(ticket, items, grads, should_update_here=next_lookup is not None)
        return response

    def contribute(
        self,
        ticket: Ticket,
        items: Sequence[Item],
        grads: Sequence[Tensor],
        *,
        should_update_here: bool = False,
    ) -> None:
        """Pass a trainer's gradients of one lookup to the update barrier.

        Args:
            grads: the gradient of each item's vectors, then the marks, if the lookup has requested them.
            should_update_here: see :meth:`UpdateBarrier.contribute`.

        Raises:
            ClusterError: the shape of a gradient is not the shape of its vectors.
            Exception: an error of :meth:`UpdateBarrier.contribute`.
        """
        with_grads: list[tuple[int, Bags, Tensor]] = []
        idle: frozenset[str] = frozenset()
        grads, marks = grads[: len(items)], grads[len(items) :]
        for (group, bags), grad in zip(items, grads, strict=True):
            if grad.shape != (bags.num_bags, self.groups[group].group.dim):
                raise ClusterError(
                    f"trainer {ticket.trainer} sent gradients of shape {list(grad.shape)} for "
                    f"{bags.num_bags} vectors of {self.groups[group].group.dim}"
                )
            with_grads.append((group, bags, grad.to(self._dtype)))
        if marks and not marks[0].all():
            with_grads, idle = self._select_used(with_grads, marks[0].bool())
        self.barrier.contribute(ticket, (with_grads, idle), should_update_here=should_update_here)

    def _select_used(self, items: Sequence[tuple[int, Bags, Tensor]], is_used: Tensor) -> Gradients:
        """Return the items without unused bags, and the names of unused tables; ``is_used`` has the marks."""
        sizes = [len(grad) for _, _, grad in items]
        *of_items, of_tables = is_used.split([*sizes, len(self._tables)])
        kept = []
        for (group, bags, grad), is_used_B in zip(items, of_items, strict=True):
            if bags.offsets is None:
                kept.append((group, Bags(bags.ids_L[is_used_B]), grad[is_used_B]))
            elif is_used_B.all():
                kept.append((group, bags, grad))
        idle = frozenset(name for name, mark in zip(self._tables, of_tables, strict=True) if not mark)
        return kept, idle

    def load(self, folder: StoragePath, step: int) -> None:
        """Read a checkpoint, and continue after ``step`` steps. Raise CheckpointError if it does not fit."""
        checkpoint = Checkpoint.open(folder)
        if checkpoint.is_exported:
            raise CheckpointError(f"{folder}: is an export, without counts of keys and state of optimizers")
        self.barrier.drain()
        for group in self.groups:
            group.load(checkpoint)
        self._prefetched.clear()
        self.barrier.restart(step)

    def track_changes(self) -> None:
        """Start to record which rows updates change, for the next delta. Forget earlier changes."""
        for group in self.groups:
            group.track_changes()

    def _files(self, is_copied: bool, is_delta: bool) -> dict[str, Callable[[], Mapping[str, Tensor]]]:
        if is_delta:
            changes = {name: tensors for g in self.groups for name, tensors in g.take_changes().items()}
            return {name: partial(dict, tensors) for name, tensors in changes.items()}
        return {name: of_file for g in self.groups for name, of_file in g.files(is_copied).items()}

    def _find_distinct_rows(self, step: int) -> None:
        """Find the distinct rows of the prefetched lookups of a step, before their gradients arrive."""
        with self.clock.span("distinct rows", step), self._distinct_rows_lock:
            bags_of: dict[int, list[Bags]] = {}
            for key in sorted(key for key in list(self._prefetched) if key.step == step):
                for group, bags in self._prefetched.get(key, ()):  # empty if the gradients have just arrived
                    if self.groups[group].group.optimizer.name != "frozen":
                        bags_of.setdefault(group, []).append(bags)
            self._distinct_rows = {g: self.groups[g].find_distinct_rows(of) for g, of in bags_of.items()}

    def _merge(self, step: int, contributions: list[Gradients]) -> TableUpdate:
        # Groups that update all rows take part in each step, even if it touches none of them.
        parts: dict[int, list[tuple[Bags, Tensor]]] = {
            number: [] for number, each in enumerate(self.groups) if each.group.optimizer.steps_all_rows
        }
        for group, bags, grad_BD in chain.from_iterable(items for items, _ in contributions):
            if self.groups[group].group.optimizer.name != "frozen":
                parts.setdefault(group, []).append((bags, grad_BD))
        with self._distinct_rows_lock:
            distinct_rows = self._distinct_rows
            self._distinct_rows = {}
        merged = []
        for number, of_group in parts.items():
            table_group = self.groups[number]
            all_bags = [bags for bags, _ in of_group]
            rows = distinct_rows.get(number)
            if rows is None or not rows.is_of(all_bags):
                with self.clock.span("distinct rows", step):
                    rows = table_group.find_distinct_rows(all_bags)
            merged.append((table_group, table_group.merge(rows, [grad_BD for _, grad_BD in of_group])))
        idle = frozenset.intersection(*(unused for _, unused in contributions))
        factor = self._rules.schedule.factor(step)
        return TableUpdate(merged, step, factor, self._rules.check_finite, idle)


class _Pool(torch.autograd.Function):
    """Autograd function that pools rows, and in its backward pass calls :meth:`TableShards.contribute`.

    An output of int16 can have no gradient. For each one, a tensor of zeros is another output, which can.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        anchor: Tensor,
        shards: TableShards,
        ticket: Ticket,
        items: Sequence[Item],
    ) -> tuple[Tensor, ...]:
        pooled, recorded = shards.pool_and_record(items, ticket.purpose)
        if has_marks(items):
            pooled.append(shards.empty_marks(recorded))
        ctx.arguments = shards, ticket, recorded  # type: ignore[attr-defined]
        bits = [index for index, tensor in enumerate(pooled) if tensor.dtype is torch.int16]
        ctx.bits = bits  # type: ignore[attr-defined]
        return *pooled, *(torch.zeros(()).expand(pooled[index].shape) for index in bits)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[None, ...]:
        shards, ticket, recorded = ctx.arguments  # type: ignore[attr-defined]
        of_items = [*grads]
        for index in reversed(ctx.bits):  # type: ignore[attr-defined]
            of_items[index] = of_items.pop()
        shards.contribute(ticket, recorded, of_items)
        return None, None, None, None
