"""The trainer's side of a lookup: from the ids of a batch to vectors, in one message per worker and step.

Features with one id per sample travel as distinct rows: each row is fetched once and copied to the samples
here, and its gradients are summed here before they are sent. With skewed ids this is a fraction of the bytes.
Sequences travel likewise. Other multi-hot features are pooled by the worker, which sends one vector per
sample, or by the trainer from distinct rows, as the placement says. ``row_routes.py`` describes routes.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding import kernels
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_spec import Pooling, TableSpec, tables_of
from hybrid.embedding.trainer.bag_routes import BagRoute, MultiHotRoute, PoolRoute
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.lookup import ConcatenatedFeatures, Lookup, Outbox, TableSource
from hybrid.embedding.trainer.row_routes import Items, LengthRoute, Route, RowRoute, SequenceRoute
from hybrid.errors import DataError
from hybrid.input_spec import InputSpec
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Purpose, Ticket


class Embeddings:
    """The trainer's side of all tables of a model.

    Args:
        tables, input_spec: the tables, and the features that read them.
        placement: which worker holds which rows.
        sources: by worker that holds a shard, what answers requests.
        clock: records timings.
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
        self._outbox = Outbox(sources, clock or StepClock())
        self._routes: dict[tuple[frozenset[int], frozenset[int]], list[tuple[Route, Tensor | None]]] = {}

    @property
    def widths(self) -> list[int]:
        """Number of output columns of each feature, in feature order."""
        return [t.width for t in self._tables]

    def lookup(self, sparse: SparseFeatures, ticket: Ticket, after: Lookup | None = None) -> Lookup:
        """Start the lookup of a batch, and do not wait.

        Args:
            sparse: ids of K features for B samples.
            ticket: step, required version of the rows, and purpose. For training, the backward pass must
                reach every lookup exactly once.
            after: a prefetched lookup of an earlier step, with whose gradients the requests are sent; None to
                send them now.

        Raises:
            DataError: an id is not a row of its table, a feature that is not multi-hot does not have one id
                in each sample, a sequence is too long, or weighted ids have max pooling.
        """
        items: Items = {worker: [] for worker in self._outbox.sources}
        with self._outbox.clock.span("ids"):
            ids = BatchIds(sparse)
            self._check(sparse, ids)
            routes = [
                (route.start(ids, items), columns_F) for route, columns_F in self._routes_for(sparse, ids)
            ]
        layout = ConcatenatedFeatures(routes, sum(self.widths))
        return Lookup(ticket, items, layout, self._outbox, is_empty=not routes).start(after)

    def empty_lookup(self, ticket: Ticket, after: Lookup | None = None) -> Lookup:
        """Return the lookup of no samples, without a request."""
        workers = self._outbox.sources if ticket.purpose is Purpose.PREFETCH else ()
        layout = ConcatenatedFeatures((), sum(self.widths))
        items: Items = {worker: [] for worker in workers}
        return Lookup(ticket, items, layout, self._outbox, is_empty=True).start(after)

    def flush(self) -> None:
        """Wait until all sent gradients have arrived."""
        self._outbox.flush()

    def _routes_for(self, sparse: SparseFeatures, ids: BatchIds) -> list[tuple[Route, Tensor | None]]:
        """Return the routes, each with the first output column of each vector; None for all, in order."""
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
            first_K = torch.tensor([0, *self.widths]).cumsum(0)
            routes = self._routes[bags, weighted] = []
            for route in make_routes(rows, sorted(bags), self._tables, self._placement, weighted):
                columns_F = None
                if route.features != tuple(every) or self._sequences:
                    tables = [(k, self._tables[k]) for k in route.features]
                    firsts = [first_K[k] + torch.arange(t.num_vectors) * t.dim for k, t in tables]
                    columns_F = torch.cat(firsts)
                routes.append((route, columns_F))
            if self._sequences:
                last_K = first_K[1:] - 1
                routes.append((LengthRoute(self._sequences), last_K[list(self._sequences)]))
        return self._routes[bags, weighted]

    def _check(self, sparse: SparseFeatures, ids: BatchIds) -> None:
        if sparse.num_features != len(self._features):
            raise DataError(f"the batch has {sparse.num_features} sparse features, not {len(self._features)}")
        position = kernels.first_outside(ids.ids_L.numpy(), ids.ends_K.numpy(), self._num_rows_K.numpy())
        if position >= 0:
            k = int((ids.ends_K <= position).sum())
            sample = int((ids.offsets[1:] <= position).sum()) - k * ids.batch_size
            raise DataError(
                f"feature {self._features[k].name}, sample {sample}: id {int(sparse.ids_L[position])} is not "
                f"a row of table {self._tables[k].name} ({self._tables[k].num_rows} rows)"
            )
        if sparse.offsets is not None:
            one_K1 = torch.tensor([not f.multi_hot for f in self._features]).unsqueeze(1)
            wrong_KB = one_K1 & (sparse.offsets.diff().view(len(self._features), -1) != 1)
            if wrong_KB.any():
                k, sample = wrong_KB.nonzero()[0].tolist()
                raise DataError(f"feature {self._features[k].name}: sample {sample} must have exactly one id")
        for k in self._sequences:
            lengths_B, limit, name = ids.bounds(k).diff(), self._tables[k].sequence, self._features[k].name
            if (is_wrong_B := lengths_B > limit).any():
                sample = int(is_wrong_B.nonzero()[0])
                raise DataError(
                    f"feature {name}, sample {sample}: {int(lengths_B[sample])} ids are more than the "
                    f"{limit} of a sequence (columns.{name}.max_ids)"
                )
        for k in ids.weighted.difference(self._sequences):
            if self._tables[k].pooling is Pooling.MAX:
                name = self._features[k].name
                raise DataError(f"feature {name}: weighted ids have no max pooling")


def make_routes(
    row_features: Sequence[int],
    bag_features: Sequence[int],
    tables: Sequence[TableSpec],
    placement: Placement,
    weighted: Collection[int] = (),
) -> list[Route]:
    """Return the routes of a batch.

    Args:
        row_features: features with one id per sample, and sequences.
        bag_features: multi-hot features.
        tables: table of each feature, in feature order.
        weighted: those of ``bag_features`` whose ids have weights.
    """
    by_table = placement.locations()
    locations = [by_table[table.name] for table in tables]
    # Features that share a route: same width; for bags, also same pooling and weighting, and same groups if
    # workers pool.
    of_dim: dict[int, list[int]] = defaultdict(list)
    for k in row_features:
        of_dim[tables[k].dim].append(k)
    bags: dict[tuple[type[MultiHotRoute], Pooling, bool, object], list[int]] = defaultdict(list)
    for k in bag_features:
        if tables[k].name in placement.pooled_by_trainers:
            bags[PoolRoute, tables[k].pooling, k in weighted, tables[k].dim].append(k)
        else:
            groups = tuple((at.worker, at.number) for at in locations[k])
            bags[BagRoute, tables[k].pooling, k in weighted, groups].append(k)
    routes: list[Route] = []
    for _, features in sorted(of_dim.items()):
        of_features = [locations[k] for k in features]
        if any(tables[k].sequence for k in features):
            sizes_F = [tables[k].num_vectors for k in features]
            routes.append(SequenceRoute(tuple(features), of_features, sizes_F))
        else:
            routes.append(RowRoute(tuple(features), of_features))
    for (kind, pooling, is_weighted, _), features in sorted(
        bags.items(), key=lambda item: item[0][0] is BagRoute
    ):
        routes.append(kind(tuple(features), [locations[k] for k in features], pooling, is_weighted))
    return routes
