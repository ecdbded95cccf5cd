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
from hybrid.embedding.trainer.bag_route import BagRoute
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.lookup import Lookup, Outbox, TableSource, in_memory_of_its_own
from hybrid.embedding.trainer.pool_route import PoolRoute
from hybrid.embedding.trainer.route import Assembler, Items, Results, Slot, append
from hybrid.embedding.trainer.row_route import AddressSpace, Rows
from hybrid.errors import DataError
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Ticket


class TableRequest(NamedTuple):
    """One call of a table.

    Attributes:
        table: its name.
        ids_L: rows of it, int64, one after another.
        offsets: int64, where each bag starts (bags + 1); None where each id gives a vector of its own.
        weights_L: float32 weight of each id within its bag, or None for ones. Only for sum pooling.
        pooling: how a bag becomes one vector.
    """

    table: str
    ids_L: Tensor
    offsets: Tensor | None = None
    weights_L: Tensor | None = None
    pooling: Pooling = Pooling.SUM


class ModuleTables:
    """The tables of a module, as a trainer sees them.

    Args:
        tables: all of them.
        placement: which worker holds which rows.
        sources: for every worker that holds a shard, whoever answers for it.
        clock: records what lookups cost, where it records.
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
        self._pooled_here = frozenset(placement.pooled_by_trainers)
        self._sources = sources
        self._outbox = Outbox()
        self._clock = clock
        by_dim: dict[int, list[str]] = defaultdict(list)
        for table in tables:
            by_dim[table.dim].append(table.name)
        self._spaces = {
            dim: AddressSpace([self._locations[n] for n in names]) for dim, names in by_dim.items()
        }
        self._number = {name: number for names in by_dim.values() for number, name in enumerate(names)}
        self._first_dims = {worker: placement.groups(worker)[0].dim for worker in sources}

    def lookup(self, asked: Sequence[TableRequest], ticket: Ticket, after: Lookup | None = None) -> Lookup:
        """Start looking up; nothing waits here. All workers are asked, and await gradients.

        The outputs are the vectors of each call, (ids or bags, D), and after them a scalar, zero. Whoever
        adds that to a loss has the backward pass reach the lookup, whatever became of the vectors.

        Args:
            ticket, after: see :meth:`Embeddings.lookup`.

        Raises:
            DataError: an id is not a row of its table, or the bags are none.
        """
        items: Items = {worker: [] for worker in self._sources}
        with self._clock.span("ids"):
            for each in asked:
                self._check(each)
            form = self._form(asked, items)
        lookup = Lookup(ticket, items, form, self._sources, self._outbox, self._clock)
        if after is None:
            lookup.start()
        else:
            lookup.start_with_gradients_of(after)
        return lookup

    def nothing(self, ticket: Ticket, after: Lookup | None = None) -> Lookup:
        """See :meth:`Embeddings.nothing`; there is none, since every trainer has a share of every batch."""
        raise AssertionError("no trainer ends before the others")

    def settle(self) -> None:
        """Return once all gradients that were sent by messages of their own have arrived."""
        self._outbox.settle()

    def _form(self, asked: Sequence[TableRequest], items: Items) -> _Apart:
        form = _Apart(len(asked), [], [], [])
        of_dim: dict[int, list[int]] = defaultdict(list)
        for place, each in enumerate(asked):
            if each.offsets is None:
                of_dim[self._tables[each.table].dim].append(place)
            else:
                form.bags.append((place, self._bags(each, items)))
        for dim, places in sorted(of_dim.items()):
            sizes = [len(asked[place].ids_L) for place in places]
            form.rows.append(
                (places, sizes, self._rows(dim, [asked[place] for place in places], sizes, items))
            )
        for worker, of_worker in items.items():
            if not of_worker:  # an answer of no tensors would be no part of the graph, and bring no gradients
                slot = append(items, worker, (0, Bags(torch.empty(0, dtype=torch.int32))))
                form.unused.append((slot, self._first_dims[worker]))
        return form

    def _bags(self, each: TableRequest, items: Items) -> Assembler:
        kind: type[PoolRoute | BagRoute] = PoolRoute if each.table in self._pooled_here else BagRoute
        locations, is_weighted = [self._locations[each.table]], each.weights_L is not None
        route = kind((0,), locations, each.pooling, is_weighted=is_weighted)
        sparse = SparseFeatures(each.ids_L, each.offsets, each.weights_L, 1)
        return route.start(BatchIds(sparse), items)

    def _rows(self, dim: int, asked: Sequence[TableRequest], sizes: list[int], items: Items) -> Rows:
        space = self._spaces[dim]
        addresses_L = torch.empty(sum(sizes), dtype=space.dtype)
        for each, out_L in zip(asked, addresses_L.split(sizes), strict=True):
            space.write(each.ids_L.view(1, -1), self._number[each.table], out_L.view(-1, 1))
        return space.ask(addresses_L, items)

    def _check(self, each: TableRequest) -> None:
        table = self._tables[each.table]
        ends, rows = torch.tensor([len(each.ids_L)]), torch.tensor([table.num_rows])
        outside = kernels.first_outside(each.ids_L.numpy(), ends.numpy(), rows.numpy())
        if outside >= 0:
            raise DataError(
                f"table {table.name}: id {int(each.ids_L[outside])}, number {outside} of those asked for, "
                f"is not one of its {table.num_rows} rows"
            )


class _Apart(NamedTuple):
    """The vectors of each call by themselves, and a zero.

    Attributes:
        num_calls: how many there are.
        rows: of calls of one width whose ids stay apart: places among all calls, numbers of ids, the rows.
        bags: of a call whose ids are pooled: its place, and who has its vectors.
        unused: what workers are asked for that hold nothing of what is wanted, no rows of some width.
    """

    num_calls: int
    rows: list[tuple[list[int], list[int], Rows]]
    bags: list[tuple[int, Assembler]]
    unused: list[tuple[Slot, int]]

    def outputs(self, results: Results) -> tuple[Tensor, ...]:
        found: dict[int, Tensor] = {}
        for places, sizes, rows in self.rows:
            rows_UD, ranks_L = rows.answered(results)
            for place, of_call in zip(places, ranks_L.split(sizes), strict=True):
                found[place] = rows_UD.index_select(0, of_call)
        for place, assembler in self.bags:
            found[place] = assembler.vectors(results).flatten(0, 1)
        return *(found[place] for place in range(self.num_calls)), torch.zeros(())

    def gradients(self, grads: Sequence[Tensor]) -> Iterator[tuple[Slot, Tensor]]:
        for places, _, rows in self.rows:
            yield from rows.gradients(torch.cat([grads[place] for place in places]))
        for place, assembler in self.bags:
            yield from assembler.gradients(in_memory_of_its_own(grads[place]).view(assembler.shape_BFD))
        for slot, dim in self.unused:
            yield slot, torch.empty(0, dim)
