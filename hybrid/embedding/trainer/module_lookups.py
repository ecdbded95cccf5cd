"""Lookups of custom modules: any calls of any tables, in one message per worker.

Each call of a table is a :class:`TableRequest`. Ids that are not pooled travel as distinct rows, one set for
all calls of tables of one width. Bags are pooled by the workers or by the trainer, as the placement says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_spec import Pooling, TableSpec
from hybrid.embedding.trainer.bag_routes import BagRoute, PoolRoute
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.lookup import Lookup, Outbox, TableSource, contiguous_copy
from hybrid.embedding.trainer.row_routes import (
    AddressSpace,
    Assembler,
    DistinctRows,
    Items,
    Responses,
    Slot,
    append,
)
from hybrid.errors import DataError
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Ticket


class TableRequest(NamedTuple):
    """One call of a table.

    Attributes:
        table: name of the table.
        ids_L: int64 rows of the table.
        offsets: int64, where each bag starts (bags + 1); None for one vector per id.
        weights_L: float32 weight of each id within its bag, or None for ones; for sum pooling only.
        pooling: how a bag becomes one vector.
    """

    table: str
    ids_L: Tensor
    offsets: Tensor | None = None
    weights_L: Tensor | None = None
    pooling: Pooling = Pooling.SUM


class ModuleTables:
    """The trainer's side of the tables of a custom module.

    Args:
        tables: all tables.
        placement: which worker holds which rows.
        sources: by worker that holds a shard, what answers requests.
        clock: records timings.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        placement: Placement,
        sources: Mapping[int, TableSource],
        clock: StepClock,
    ) -> None:
        self._tables = {table.name: table for table in tables}
        self._locations = placement.locations()
        self._pooled_by_trainers = frozenset(placement.pooled_by_trainers)
        self._outbox = Outbox(sources, clock)
        by_dim: dict[int, list[str]] = defaultdict(list)
        for table in tables:
            by_dim[table.dim].append(table.name)
        self._spaces = {
            dim: AddressSpace([self._locations[name] for name in names]) for dim, names in by_dim.items()
        }
        self._index_in_space = {name: index for names in by_dim.values() for index, name in enumerate(names)}
        self._first_dims = {worker: placement.groups(worker)[0].dim for worker in sources}

    def lookup(self, requests: Sequence[TableRequest], ticket: Ticket, after: Lookup | None = None) -> Lookup:
        """Start a lookup on all workers, and do not wait. Each worker then expects gradients.

        The outputs are the vectors of each call, (ids or bags, D), and a scalar zero. A loss that includes
        the zero has a backward pass that reaches the lookup even if it uses no vector.

        Args:
            ticket, after: see :meth:`Embeddings.lookup`.

        Raises:
            DataError: an id is not a row of its table, or offsets do not match the ids.
        """
        items: Items = {worker: [] for worker in self._outbox.sources}
        with self._outbox.clock.span("ids"):
            for request in requests:
                self._check(request)
            layout = self._layout(requests, items)
        return Lookup(ticket, items, layout, self._outbox).start(after)

    def empty_lookup(self, ticket: Ticket, after: Lookup | None = None) -> Lookup:
        """Not used: in a custom loop, every trainer has a slice of every batch."""
        raise AssertionError("no trainer of a custom loop ends before the others")

    def flush(self) -> None:
        """Wait until all sent gradients have arrived."""
        self._outbox.flush()

    def _layout(self, requests: Sequence[TableRequest], items: Items) -> _SeparateCalls:
        """Append the requests to the messages of the workers."""
        layout = _SeparateCalls(len(requests), [], [], [])
        calls_of_dim: dict[int, list[int]] = defaultdict(list)
        for call, request in enumerate(requests):
            if request.offsets is None:
                calls_of_dim[self._tables[request.table].dim].append(call)
                continue
            kind = PoolRoute if request.table in self._pooled_by_trainers else BagRoute
            is_weighted = request.weights_L is not None
            route = kind((0,), [self._locations[request.table]], request.pooling, is_weighted)
            sparse = SparseFeatures(request.ids_L, request.offsets, request.weights_L, 1)
            layout.bags.append((call, route.start(BatchIds(sparse), items)))
        for dim, calls in sorted(calls_of_dim.items()):
            sizes = [len(requests[call].ids_L) for call in calls]
            space = self._spaces[dim]
            addresses_L = torch.empty(sum(sizes), dtype=space.dtype)
            for call, out_L in zip(calls, addresses_L.split(sizes), strict=True):
                index = self._index_in_space[requests[call].table]
                space.write(requests[call].ids_L.view(1, -1), index, out_L.view(-1, 1))
            layout.rows.append((calls, sizes, space.request(addresses_L, items)))
        for worker, of_worker in items.items():
            if not of_worker:  # a response without tensors is not in the graph, and sends no gradients
                slot = append(items, worker, (0, Bags(torch.empty(0, dtype=torch.int32))))
                layout.unused.append((slot, self._first_dims[worker]))
        return layout

    def _check(self, request: TableRequest) -> None:
        table = self._tables[request.table]
        ends, rows = torch.tensor([len(request.ids_L)]), torch.tensor([table.num_rows])
        position = kernels.first_outside(request.ids_L.numpy(), ends.numpy(), rows.numpy())
        if position >= 0:
            raise DataError(
                f"table {table.name}: id {int(request.ids_L[position])}, at position {position} of the call, "
                f"is not a row of the table, which has {table.num_rows} rows"
            )


class _SeparateCalls(NamedTuple):
    """An output for each call, and a zero.

    Attributes:
        num_calls: number of calls.
        rows: for each width, calls whose ids are not pooled: indices of the calls, numbers of ids, the rows.
        bags: calls whose ids are pooled: index of the call, and its assembler.
        unused: requests of no rows to workers that hold nothing of the calls, and the width of the response.
    """

    num_calls: int
    rows: list[tuple[list[int], list[int], DistinctRows]]
    bags: list[tuple[int, Assembler]]
    unused: list[tuple[Slot, int]]

    def outputs(self, responses: Responses) -> tuple[Tensor, ...]:
        vectors: dict[int, Tensor] = {}
        for calls, sizes, rows in self.rows:
            rows_UD, ranks_L = rows.received(responses)
            for call, ranks in zip(calls, ranks_L.split(sizes), strict=True):
                vectors[call] = rows_UD.index_select(0, ranks)
        for call, assembler in self.bags:
            vectors[call] = assembler.vectors(responses).flatten(0, 1)
        return *(vectors[call] for call in range(self.num_calls)), torch.zeros(())

    def gradients(self, grads: Sequence[Tensor]) -> Iterator[tuple[Slot, Tensor]]:
        for calls, _, rows in self.rows:
            yield from rows.gradients(torch.cat([grads[call] for call in calls]))
        for call, assembler in self.bags:
            yield from assembler.gradients(contiguous_copy(grads[call]).view(assembler.shape_BFD))
        for slot, dim in self.unused:
            yield slot, torch.empty(0, dim)
