"""The trainer's side: from the ids of a batch to pooled vectors, one call a worker a step.

Features that hold exactly one id a sample travel as rows: each distinct row is fetched once and spread
over the samples here, and its gradients are summed here before they go back; on skewed ids that is a
fraction of the bytes. So do sequences, whose vectors stay apart. Other multi-hot features are pooled by
the worker: one vector a sample comes back, however many ids went there; or here, of distinct rows too,
where the placement says so.
``hybrid/embedding/trainer/route.py`` says how a route works.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding import kernels
from hybrid.embedding.placement import Location, Placement
from hybrid.embedding.table_spec import Pooling, TableSpec, tables_of
from hybrid.embedding.trainer.bag_route import BagRoute
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.lookup import Columns, Lookup, Outbox, SideBySide, TableSource
from hybrid.embedding.trainer.pool_route import PoolRoute
from hybrid.embedding.trainer.route import Items, Route
from hybrid.embedding.trainer.row_route import RowRoute
from hybrid.embedding.trainer.sequence_route import LengthRoute, SequenceRoute
from hybrid.errors import DataError
from hybrid.input_spec import InputSpec
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Purpose, Ticket


class Embeddings:
    """All tables of a model, as a trainer sees them.

    Args:
        tables, input_spec: the tables, and the features that read them.
        placement: which worker holds which rows.
        sources: for every worker that holds a shard, whoever answers for it.
        clock: records what lookups cost, where it records.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        input_spec: InputSpec,
        placement: Placement,
        sources: Mapping[int, TableSource],
        clock: StepClock | None = None,
    ) -> None:
        self._features = input_spec.sparse_features
        self._tables = tables_of(input_spec, tables)
        self._sequences = tuple(k for k, t in enumerate(self._tables) if t.sequence)
        self._num_rows_K = torch.tensor([t.num_rows for t in self._tables])
        self._placement = placement
        self._sources = sources
        self._outbox = Outbox()
        self._clock = clock or StepClock()
        self._routes: dict[tuple[frozenset[int], frozenset[int]], list[tuple[Route, Tensor | None]]] = {}

    @property
    def widths(self) -> list[int]:
        """Width of what there is of each feature, in feature order."""
        return [t.width for t in self._tables]

    def lookup(self, sparse: SparseFeatures, ticket: Ticket, after: Lookup | None = None) -> Lookup:
        """Start looking up a batch; nothing waits here.

        Args:
            sparse: ids of K features for B samples.
            ticket: for which step, what the lookup must see, and what follows. Where gradients do, the
                backward pass must reach every lookup exactly once.
            after: a prefetched lookup of an earlier step, with whose gradients this one is to leave; None
                to leave at once.

        Raises:
            DataError: an id is not a row of its table, a feature that is not multi-hot has other than
                one id in a sample, a sequence has too many, or weights meet max pooling.
        """
        items: Items = {worker: [] for worker in self._sources}
        with self._clock.span("ids"):
            ids = BatchIds(sparse)
            self._check(sparse, ids)
            routes = self._routes_for(sparse, ids)
            parts = [Columns(route.start(ids, items), columns_F) for route, columns_F in routes]
        return self._started(self._lookup(ticket, items, parts, self._sources), after)

    def nothing(self, ticket: Ticket, after: Lookup | None = None) -> Lookup:
        """What :meth:`lookup` would give for no samples, without asking anybody."""
        sources = self._sources if ticket.purpose is Purpose.PREFETCH else {}
        return self._started(self._lookup(ticket, {worker: [] for worker in sources}, (), sources), after)

    def _lookup(
        self, ticket: Ticket, items: Items, parts: Sequence[Columns], sources: Mapping[int, TableSource]
    ) -> Lookup:
        form = SideBySide(parts, sum(self.widths))
        return Lookup(ticket, items, form, sources, self._outbox, self._clock, is_of_nothing=not parts)

    def _started(self, lookup: Lookup, after: Lookup | None) -> Lookup:
        if after is None:
            lookup.start()
        else:
            lookup.start_with_gradients_of(after)
        return lookup

    def settle(self) -> None:
        """Return once all gradients that were sent by messages of their own have arrived."""
        self._outbox.settle()

    def _routes_for(self, sparse: SparseFeatures, ids: BatchIds) -> list[tuple[Route, Tensor | None]]:
        every = range(len(self._features))
        weighted = ids.weighted
        bags = frozenset(
            k
            for k in every
            if k not in self._sequences
            and (k in weighted or (sparse.offsets is not None and self._features[k].multi_hot))
        )
        if (bags, weighted) not in self._routes:
            rows = [k for k in every if k not in bags]
            routes = make_routes(rows, sorted(bags), self._tables, self._placement, weighted)
            self._routes[bags, weighted] = [(route, self._columns(route)) for route in routes]
            if self._sequences:
                lengths = LengthRoute(self._sequences)
                last_K = torch.tensor(self.widths).cumsum(0) - 1
                self._routes[bags, weighted].append((lengths, last_K[list(self._sequences)]))
        return self._routes[bags, weighted]

    def _columns(self, route: Route) -> Tensor | None:
        """Where each vector of a route begins; None if they are all, in order."""
        if route.features == tuple(range(len(self._features))) and not self._sequences:
            return None
        first_K = torch.tensor([0, *self.widths]).cumsum(0)
        tables = [(k, self._tables[k]) for k in route.features]
        return torch.cat([first_K[k] + torch.arange(t.num_vectors) * t.dim for k, t in tables])

    def _check(self, sparse: SparseFeatures, ids: BatchIds) -> None:
        if sparse.num_features != len(self._features):
            raise DataError(f"the batch has {sparse.num_features} sparse features, not {len(self._features)}")
        outside = kernels.first_outside(ids.ids_L.numpy(), ids.ends_K.numpy(), self._num_rows_K.numpy())
        if outside >= 0:
            self._refuse_id(outside, sparse, ids)
        if sparse.offsets is not None:
            one_K1 = torch.tensor([not f.multi_hot for f in self._features]).unsqueeze(1)
            wrong_KB = one_K1 & (sparse.offsets.diff().view(len(self._features), -1) != 1)
            if wrong_KB.any():
                k, sample = wrong_KB.nonzero()[0].tolist()
                raise DataError(f"feature {self._features[k].name}: sample {sample} must hold exactly one id")
        for k in self._sequences:
            self._check_length(k, ids)
        for k in ids.weighted.difference(self._sequences):
            if self._tables[k].pooling is Pooling.MAX:
                name = self._features[k].name
                raise DataError(f"feature {name}: its ids have weights, of which there is no max pooling")

    def _check_length(self, k: int, ids: BatchIds) -> None:
        lengths_B, most, name = ids.bounds(k).diff(), self._tables[k].sequence, self._features[k].name
        if (is_wrong_B := lengths_B > most).any():
            sample = int(is_wrong_B.nonzero()[0])
            raise DataError(
                f"feature {name}, sample {sample}: {int(lengths_B[sample])} ids are more than the {most} "
                f"of a sequence (columns.{name}.max_ids)"
            )

    def _refuse_id(self, position: int, sparse: SparseFeatures, ids: BatchIds) -> NoReturn:
        """DataError for an id that is no row of its table, naming where it stands."""
        k = int((ids.ends_K <= position).sum())
        sample = int((ids.offsets[1:] <= position).sum()) - k * ids.batch_size
        raise DataError(
            f"feature {self._features[k].name}, sample {sample}: id {int(sparse.ids_L[position])} is not a "
            f"row of table {self._tables[k].name} ({self._tables[k].num_rows} rows)"
        )


def make_routes(
    row_features: Sequence[int],
    bag_features: Sequence[int],
    tables: Sequence[TableSpec],
    placement: Placement,
    weighted: Collection[int] = (),
) -> list[Route]:
    """The routes of a batch in which ``row_features`` hold one id a sample or are sequences, and
    ``bag_features`` hold any number.

    Args:
        tables: the table of each feature, in feature order.
        weighted: those of ``bag_features`` whose ids have weights.
    """
    found = placement.locations()
    locations = [found[table.name] for table in tables]
    of_dim: dict[int, list[int]] = defaultdict(list)
    for k in row_features:
        of_dim[tables[k].dim].append(k)
    # Of one pooling, with weights or without: of one width, or in the same groups.
    here: dict[tuple[Pooling, bool, int], list[int]] = defaultdict(list)
    alike: dict[tuple[Pooling, bool, tuple[tuple[int, int], ...]], list[int]] = defaultdict(list)
    for k in bag_features:
        kind = tables[k].pooling, k in weighted
        if tables[k].name in placement.pooled_by_trainers:
            here[*kind, tables[k].dim].append(k)
        else:
            alike[*kind, tuple((at.worker, at.number) for at in locations[k])].append(k)
    return [
        *(
            _row_route(tuple(features), [tables[k] for k in features], [locations[k] for k in features])
            for _, features in sorted(of_dim.items())
        ),
        *(
            PoolRoute(tuple(features), [locations[k] for k in features], pooling, is_weighted=is_weighted)
            for (pooling, is_weighted, _), features in here.items()
        ),
        *(
            BagRoute(tuple(features), [locations[k] for k in features], pooling, is_weighted=is_weighted)
            for (pooling, is_weighted, _), features in alike.items()
        ),
    ]


def _row_route(
    features: tuple[int, ...], tables: Sequence[TableSpec], locations: Sequence[Sequence[Location]]
) -> Route:
    """That of features of one width whose rows travel."""
    if any(table.sequence for table in tables):
        return SequenceRoute(features, locations, [table.num_vectors for table in tables])
    return RowRoute(features, locations)
