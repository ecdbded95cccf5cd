"""The trainer's side of a lookup: from the ids of a micro-batch to vectors, in one message per worker.

For ids that are not pooled, the trainer requests each distinct row once and copies it to the samples. The
gradients of each row are summed before they are sent. Bags are pooled by the workers, which send one vector
per sample, or by the trainer from distinct rows. The placement decides which; see ``routes.py``.

:class:`Embeddings` looks up the tables of a configured model, and returns one matrix with the vectors of all
features. :class:`ModuleTables` looks up the tables of a custom module, and returns one tensor for each call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding import kernels
from hybrid.embedding.bags import MARKS, TableRequest
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_source import TableSource
from hybrid.embedding.table_spec import AddressKey, Pooling, TableSpec, tables_of
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.lookup import Lookup, TableSources, contiguous_copy
from hybrid.embedding.trainer.routes import (
    AddressSpace,
    Assembler,
    BagRoute,
    Items,
    Locations,
    PoolRoute,
    Responses,
    Route,
    RowAssembler,
    RowRoute,
    SequenceRoute,
    Slot,
    append,
)
from hybrid.errors import DataError
from hybrid.input_spec import InputSpec
from hybrid.primitives.device_copies import to_device
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.ticket import Purpose, Ticket

_CPU = torch.device("cpu")


class Embeddings:
    """The trainer's side of all tables of a configured model, whose dense net is on ``device``."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        input_spec: InputSpec,
        placement: Placement,
        sources: Mapping[int, TableSource],
        clock: StepClock | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self._features = input_spec.sparse_features
        self._tables = tables_of(input_spec, tables)
        self._sequences = tuple(k for k, t in enumerate(self._tables) if t.sequence)
        self._ends = list(accumulate(t.width for t in self._tables))  # end of each feature's output columns
        self._num_rows_K = torch.tensor([t.num_rows for t in self._tables])
        self._placement = placement
        self.sources = TableSources(sources, clock or StepClock())
        self._device = device
        self._routes: dict[tuple[frozenset[int], frozenset[int]], list[tuple[Route, list[slice] | None]]] = {}

    def lookup(self, sparse: SparseFeatures, ticket: Ticket, previous: Lookup | None = None) -> Lookup:
        """Start the lookup of a batch, and return it without waiting for the vectors.

        Args:
            ticket: step, required version of the rows, and purpose. For training, the backward pass must
                reach every lookup exactly once.
            previous: a prefetched lookup of an earlier step, whose gradients are sent in the same messages
                as the requests of this lookup. None sends the requests now.

        Raises:
            DataError: an id is not a row of its table, or offsets or weights do not match the ids.
        """
        items: Items = {worker: [] for worker in self.sources.by_worker}
        with self.sources.clock.span("ids"):
            ids = BatchIds(sparse)
            self._check(sparse, ids)
            routes = [(route.request(ids, items), columns) for route, columns in self._routes_of(sparse, ids)]
            lengths = [(self._ends[k] - 1, ids.bounds(k).diff()) for k in self._sequences]
        rows, columns = routes[0]
        if self._device.type != "cpu" and isinstance(rows, RowAssembler) and columns is None:
            lookup = Lookup(ticket, items, GpuLayout(rows), self.sources).send_or_attach(previous)
            lookup.ranks_BF = to_device(rows.ranks().view(rows.shape_BFD[:2]), self._device)
            return lookup
        layout = ConcatenatedLayout(routes, self._ends[-1], lengths)
        return Lookup(ticket, items, layout, self.sources).send_or_attach(previous)

    def _routes_of(self, sparse: SparseFeatures, ids: BatchIds) -> list[tuple[Route, list[slice] | None]]:
        every = range(len(self._features))
        weighted = ids.weighted_features
        multi_hot = [k for k in every if sparse.offsets is not None and self._features[k].multi_hot]
        bags = weighted.union(multi_hot).difference(self._sequences)
        if (bags, weighted) not in self._routes:
            rows = [k for k in every if k not in bags]
            routes = self._routes[bags, weighted] = []
            for route in make_routes(rows, sorted(bags), self._tables, self._placement, weighted):
                columns = None
                if route.features != tuple(every) or self._sequences:
                    tables = [(self._ends[k], self._tables[k]) for k in route.features]
                    columns = [slice(end - t.width, end - bool(t.sequence)) for end, t in tables]
                routes.append((route, columns))
        return self._routes[bags, weighted]

    def _check(self, sparse: SparseFeatures, ids: BatchIds) -> None:
        position = kernels.find_invalid_id(ids.ids_L.numpy(), ids.ends_K.numpy(), self._num_rows_K.numpy())
        if position >= 0:
            k = int((ids.ends_K <= position).sum())
            sample = int((ids.offsets[1:] <= position).sum()) - k * ids.batch_size
            raise DataError(
                f"feature {self._features[k].name}, sample {sample}: id {int(sparse.ids_L[position])} is not "
                f"a row of table {self._tables[k].name} ({self._tables[k].num_rows} rows)"
            )


class GpuLayout(NamedTuple):
    """Output layout for a GPU: the distinct rows in pinned memory. The GPU copies each row to its samples."""

    rows: RowAssembler

    def outputs(self, responses: Responses) -> tuple[Tensor, ...]:
        """Return one output: the distinct rows, (U, D), in pinned memory."""
        parts = self.rows.parts(responses)
        size = sum(map(len, parts)), self.rows.shape_BFD[2]
        return (torch.cat(parts, out=torch.empty(size, dtype=parts[0].dtype, pin_memory=True)),)

    def gradients(self, grads: Sequence[Tensor]) -> Iterator[tuple[Slot, Tensor]]:
        """Split ``grads``, the gradient of the distinct rows, into the gradient of each response."""
        (grad_UD,) = grads
        return ((slot, grad_UD[first:last].clone()) for slot, first, last in self.rows.slots)


class ConcatenatedLayout(NamedTuple):
    """Output layout with one matrix ``pooled_BE``: for each sample, the vectors of all features."""

    # The assembler of each route, and the output columns of each feature; None for all features in order.
    routes: Sequence[tuple[Assembler, list[slice] | None]]
    width: int  # E, number of output columns
    # For each sequence feature, the output column for the lengths, and the lengths.
    lengths: Sequence[tuple[int, Tensor]] = ()

    def outputs(self, responses: Responses) -> tuple[Tensor, ...]:
        """Return ``pooled_BE``. The last column of a sequence feature has the lengths of the sequences."""
        vectors = [assembler.vectors(responses) for assembler, _ in self.routes]
        if self.routes[0][1] is None:
            return (vectors[0].flatten(1),)
        pooled_BE = vectors[0].new_empty(len(vectors[0]), self.width)
        for (_, columns), vectors_BFD in zip(self.routes, vectors, strict=True):
            assert columns is not None
            of_features = vectors_BFD.flatten(1).split([each.stop - each.start for each in columns], dim=1)
            for each, values in zip(columns, of_features, strict=True):
                pooled_BE[:, each] = values
        for column, lengths_B in self.lengths:
            pooled_BE[:, column] = lengths_B
        return (pooled_BE,)

    def gradients(self, grads: Sequence[Tensor]) -> Iterator[tuple[Slot, Tensor]]:
        """Yield the gradients of the responses, given the gradient of ``pooled_BE``."""
        grad_BE = contiguous_copy(*grads)
        for assembler, columns in self.routes:
            of_route = grad_BE if columns is None else torch.cat([grad_BE[:, c] for c in columns], dim=1)
            yield from assembler.gradients(of_route.view(assembler.shape_BFD))


def make_routes(
    row_features: Sequence[int],
    bag_features: Sequence[int],
    tables: Sequence[TableSpec],
    placement: Placement,
    weighted: Collection[int] = (),
) -> list[Route]:
    """Return routes (``routes.py``) that together cover the features.

    Row features share a route if they have the same width. Bag features share a route if they have the same
    width and pooling, and if all or none of them have weights. If workers pool, the tables of one route must
    also be in the same :class:`ShardGroup` objects. A growing table shares no route with other tables.

    Args:
        row_features: indices of the features that are not pooled: one id per sample, and sequences.
        bag_features: indices of the features that are pooled.
        tables: table of each feature, in feature order.
        weighted: indices of the features whose ids have weights.
    """
    of_table = placement.locations()
    of_space: dict[AddressKey, list[int]] = defaultdict(list)
    # Keys: whether workers pool, groups or width, pooling, and whether ids have weights.
    bags: dict[tuple[bool, object, Pooling, bool], list[int]] = defaultdict(list)
    for k in row_features:
        of_space[tables[k].address_key].append(k)
    for k in bag_features:
        table = tables[k]
        by_workers = tables[k].name not in placement.pooled_by_trainers
        groups = tuple((at.worker, at.group_number) for at in of_table[table.name])
        bags[by_workers, groups if by_workers else table.address_key, table.pooling, k in weighted].append(k)

    def with_locations(features: list[int]) -> tuple[tuple[int, ...], Locations]:
        return tuple(features), [of_table[tables[k].name] for k in features]

    routes: list[Route] = []
    for _, features in sorted(of_space.items()):
        if any(tables[k].sequence for k in features):
            sizes_F = [tables[k].num_vectors for k in features]
            routes.append(SequenceRoute(*with_locations(features), sizes_F))
        else:
            routes.append(RowRoute(*with_locations(features)))
    for (by_workers, _, pooling, is_weighted), features in sorted(bags.items(), key=lambda item: item[0][0]):
        kind: type[BagRoute | PoolRoute] = BagRoute if by_workers else PoolRoute
        routes.append(kind(*with_locations(features), pooling, is_weighted))
    return routes


class ModuleTables:
    """The trainer's side of the tables of a custom module."""

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
        self.sources = TableSources(sources, clock)
        of_space: dict[AddressKey, list[str]] = defaultdict(list)
        for table in tables:
            of_space[table.address_key].append(table.name)
        self._spaces = {
            key: (names, AddressSpace([self._locations[name] for name in names]))
            for key, names in of_space.items()
        }

    def lookup(
        self, requests: Sequence[TableRequest], ticket: Ticket, previous: Lookup | None = None
    ) -> Lookup:
        """Start the lookup for several calls of ``hybrid.Embedding`` on all workers, without waiting.

        The outputs are the vectors of each call, (ids or bags, D), and a scalar zero. In training, each
        worker expects gradients of the lookup. Add the zero to the loss, so that the backward pass reaches
        the lookup even if the loss uses no vector. Calls that the loss does not use update no rows.

        Args:
            requests: the table and ids of each call.
            ticket, previous: see :meth:`Embeddings.lookup`, also for errors.
        """
        items: Items = {worker: [] for worker in self.sources.by_worker}
        with self.sources.clock.span("ids"):
            for name, bags in requests:
                self._check(self._tables[name], bags.ids_L)
            layout = self._layout(requests, items, ticket.purpose)
        return Lookup(ticket, items, layout, self.sources).send_or_attach(previous)

    def _layout(self, requests: Sequence[TableRequest], items: Items, purpose: Purpose) -> _CallLayout:
        vectors = [(self._tables[name], bags.num_bags) for name, bags in requests]
        layout = _CallLayout(vectors, [], [], {}, [*self._tables.values()], purpose)
        calls_of_space: dict[AddressKey, list[int]] = defaultdict(list)
        for call, (name, bags) in enumerate(requests):
            if bags.offsets is None:
                calls_of_space[self._tables[name].address_key].append(call)
                continue
            kind: type[BagRoute | PoolRoute] = BagRoute
            if name in self._pooled_by_trainers:
                kind = PoolRoute
            route = kind((0,), [self._locations[name]], bags.pooling, bags.weights_L is not None)
            sparse = SparseFeatures(bags.ids_L, bags.offsets, bags.weights_L, 1)
            layout.bags.append((call, route.request(BatchIds(sparse), items)))
        for key, calls in sorted(calls_of_space.items()):
            sizes = [vectors[call][1] for call in calls]
            names, space = self._spaces[key]
            addresses_L = torch.empty(sum(sizes), dtype=space.dtype)
            for call, out_L in zip(calls, addresses_L.split(sizes), strict=True):
                name, bags = requests[call]
                space.write(bags.ids_L.view(1, -1), names.index(name), out_L.view(-1, 1))
            layout.rows.append((calls, sizes, space.request(addresses_L, (sum(sizes), 1, space.dim), items)))
        for worker in items if purpose is not Purpose.PREDICT else ():
            sizes = [bags.num_bags for _, bags in items[worker]]
            layout.marks[append(items, worker, MARKS)] = sizes
        return layout

    def _check(self, table: TableSpec, ids_L: Tensor) -> None:
        position = kernels.find_invalid_id(ids_L.numpy(), np.array([len(ids_L)]), np.array([table.num_rows]))
        if position >= 0:
            raise DataError(
                f"table {table.name}: id {int(ids_L[position])}, at position {position} of the call, "
                f"is not a row of the table, which has {table.num_rows} rows"
            )


class _CallLayout(NamedTuple):
    """Output layout with the vectors of each call of ``hybrid.Embedding``, and a scalar zero."""

    calls: list[tuple[TableSpec, int]]  # table and number of vectors of each call
    # For each width, the calls without pooling: indices of the calls, numbers of ids, and the rows.
    rows: list[tuple[list[int], list[int], RowAssembler]]
    bags: list[tuple[int, Assembler]]  # calls that pool: index of the call, and its assembler
    # For each worker, the slot of the marks, and the numbers of bags in the other requests.
    marks: dict[Slot, list[int]]
    tables: list[TableSpec]
    purpose: Purpose

    def outputs(self, responses: Responses) -> tuple[Tensor, ...]:
        vectors: dict[int, Tensor] = {}
        for calls, sizes, rows in self.rows:
            rows_UD, ranks_L = rows.collect(responses)
            for call, ranks in zip(calls, ranks_L.split(sizes), strict=True):
                vectors[call] = rows_UD.index_select(0, ranks)
        for call, assembler in self.bags:
            # Detached, since torch refuses in-place changes of views.
            vectors[call] = assembler.vectors(responses).flatten(0, 1).detach()
        return *(vectors[call] for call in range(len(self.calls))), torch.zeros(())

    def gradients(self, grads: Sequence[Tensor | None]) -> Iterator[tuple[Slot, Tensor]]:
        of_calls = [
            torch.zeros(size, table.dim) if grad is None else grad
            for (table, size), grad in zip(self.calls, grads, strict=False)
        ]
        used: dict[Slot, Tensor] = {}  # marks of requests, if the loss does not use all bags
        for calls, sizes, rows in self.rows:
            yield from rows.gradients(torch.cat([of_calls[call] for call in calls]))
            if any(grads[call] is None for call in calls):
                is_used_L = np.repeat([grads[call] is not None for call in calls], sizes)
                is_used_U = np.logical_or.reduceat(is_used_L[rows.order_L], rows.starts_V[:-1])
                used |= {slot: torch.from_numpy(is_used_U[first:last]) for slot, first, last in rows.slots}
        for call, assembler in self.bags:
            for slot, grad in assembler.gradients(contiguous_copy(of_calls[call]).view(assembler.shape_BFD)):
                yield slot, grad
                if grads[call] is None:
                    used[slot] = torch.zeros(len(grad))
        called = {table.name for (table, _), grad in zip(self.calls, grads, strict=False) if grad is not None}
        of_tables = [t.name in called or not t.optimizer.steps_all_rows for t in self.tables]
        for (worker, index), sizes in self.marks.items():
            num_marks = 0 if self.purpose is Purpose.PREFETCH else sum(sizes) + len(of_tables)
            marks = torch.ones(()).expand(num_marks)
            if used or not all(of_tables):
                of_bags = [used.get((worker, i), torch.ones(size)) for i, size in enumerate(sizes)]
                marks = torch.cat([*of_bags, torch.tensor(of_tables)]).float()
            yield (worker, index), marks
