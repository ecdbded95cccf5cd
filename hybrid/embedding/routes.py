"""Where the ids of a batch go, and how the answers become vectors of samples.

A route covers some features. It adds the lookups it needs to the items of each worker and returns the
function that turns the workers' answers into vectors of shape (B, its features, D). Three kinds:

=========== ============================== =================================== ====================
route       features                       asks a worker for                   joins the answers by
=========== ============================== =================================== ====================
RowRoute    exactly one id a sample        each distinct row once              spreading rows over samples
PooledRoute multi-hot, table on one worker one pooled vector a sample          nothing to join
SplitRoute  multi-hot, table on several    a partial pool a sample, of each    sum or max over shards
=========== ============================== =================================== ====================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding.kernels import Bags
from hybrid.embedding.placement import Group, Placement, Shard
from hybrid.embedding.spec import Pooling, TableSpec

# One lookup in one group of a worker's tables: the group's number, and the rows within it.
Item: TypeAlias = tuple[int, Bags]
Items: TypeAlias = Mapping[int, list[Item]]
Results: TypeAlias = Mapping[int, Sequence[Tensor]]
Finish: TypeAlias = Callable[[Results], Tensor]


class BatchIds:
    """The ids of one batch, feature by feature."""

    def __init__(self, sparse: SparseFeatures) -> None:
        self._sparse = sparse
        self.batch_size = sparse.batch_size
        if sparse.offsets is None:
            self._bounds = [k * self.batch_size for k in range(sparse.num_features + 1)]
        else:
            bag_starts = torch.arange(sparse.num_features + 1) * self.batch_size
            self._bounds = sparse.offsets[bag_starts].tolist()
        self.counts_K = torch.tensor(self._bounds).diff()

    def feature(self, k: int) -> Tensor:
        """All ids of feature k, in sample order."""
        return self._sparse.ids_L[self._bounds[k] : self._bounds[k + 1]]

    def weights(self, k: int) -> Tensor | None:
        weights_L = self._sparse.weights_L
        return None if weights_L is None else weights_L[self._bounds[k] : self._bounds[k + 1]]

    def offsets(self, k: int) -> Tensor:
        """Where each sample's bag starts among the ids of feature k, (B + 1)."""
        if self._sparse.offsets is None:
            return torch.arange(self.batch_size + 1)
        first = k * self.batch_size
        return self._sparse.offsets[first : first + self.batch_size + 1] - self._bounds[k]

    def single(self, features: Sequence[int]) -> Tensor:
        """Ids of features that hold one id a sample, (features, B)."""
        if self._sparse.offsets is None and len(features) == self._sparse.num_features:
            return self._sparse.ids_L.view(len(features), self.batch_size)
        return torch.stack([self.feature(k) for k in features])


class Route(Protocol):
    """A way for some features; see the module's docstring."""

    features: tuple[int, ...]

    def start(self, ids: BatchIds, items: Items) -> Finish:
        """Append this route's lookups to ``items``; return what turns the answers into vectors."""
        ...


def _append(items: Items, worker: int, item: Item) -> tuple[int, int]:
    """Add an item to a worker's list; the place where its answer will be."""
    items[worker].append(item)
    return worker, len(items[worker]) - 1


class RowRoute:
    """Features with one id a sample and one width: distinct rows travel once.

    Every row of every table gets an address: the groups that hold it lie one after another in one range
    of integers, so that a single sort finds the distinct rows of all features and of all workers.
    """

    def __init__(
        self, features: tuple[int, ...], tables: Sequence[TableSpec], groups: Mapping[int, Sequence[Group]]
    ) -> None:
        self.features = features
        dim = tables[features[0]].dim
        address_of: dict[tuple[str, int], int] = {}
        self._segments: list[tuple[int, int]] = []
        starts = [0]
        for worker, worker_groups in groups.items():
            for number, group in enumerate(worker_groups):
                if group.dim != dim:
                    continue
                for shard, start in zip(group.shards, group.starts, strict=True):
                    address_of[shard.table.name, shard.index] = starts[-1] + start
                self._segments.append((worker, number))
                starts.append(starts[-1] + group.num_rows)
        self._starts = torch.tensor(starts)
        counts = [sum(name == tables[k].name for name, _ in address_of) for k in features]
        bases = [[address_of.get((tables[k].name, s), 0) for s in range(max(counts))] for k in features]
        self._base_KS = torch.tensor(bases)
        self._count_K1 = torch.tensor(counts).unsqueeze(1)
        self._is_split = max(counts) > 1

    def start(self, ids: BatchIds, items: Items) -> Finish:
        addresses, inverse_KB = torch.unique(self._addresses(ids.single(self.features)), return_inverse=True)
        bounds = torch.searchsorted(addresses, self._starts).tolist()
        slots = []
        for segment, (worker, group) in enumerate(self._segments):
            rows = addresses[bounds[segment] : bounds[segment + 1]] - self._starts[segment]
            slots.append(_append(items, worker, (group, Bags(rows))))
        inverse_BK = inverse_KB.t()

        def finish(results: Results) -> Tensor:
            rows_UD = torch.cat([results[worker][place] for worker, place in slots])
            return F.embedding(inverse_BK, rows_UD)

        return finish

    def _addresses(self, ids_KB: Tensor) -> Tensor:
        if not self._is_split:
            return ids_KB + self._base_KS
        return self._base_KS.gather(1, ids_KB % self._count_K1) + ids_KB // self._count_K1


class PooledRoute:
    """Multi-hot features whose tables lie whole in one group of one worker and share a pooling."""

    def __init__(
        self, features: tuple[int, ...], starts: Sequence[int], worker: int, group: int, pooling: Pooling
    ) -> None:
        self.features = features
        self._starts = starts
        self._worker = worker
        self._group = group
        self._pooling = pooling

    def start(self, ids: BatchIds, items: Items) -> Finish:
        parts = [ids.feature(k) + start for k, start in zip(self.features, self._starts, strict=True)]
        offsets, base = [], 0
        for k, part in zip(self.features, parts, strict=True):
            offsets.append(ids.offsets(k)[:-1] + base)
            base += len(part)
        offsets.append(torch.tensor([base]))
        weights = [w for k in self.features if (w := ids.weights(k)) is not None]
        bags = Bags(
            torch.cat(parts), torch.cat(offsets), torch.cat(weights) if weights else None, self._pooling
        )
        worker, place = _append(items, self._worker, (self._group, bags))
        shape = (len(self.features), ids.batch_size, -1)
        return lambda results: _split_features(results[worker][place], shape)


def _split_features(pooled_ND: Tensor, shape: tuple[int, int, int]) -> Tensor:
    num_features, batch_size, _ = shape
    return pooled_ND.view(num_features, batch_size, pooled_ND.shape[1]).transpose(0, 1)


class SplitRoute:
    """One multi-hot feature of a table split over several workers."""

    def __init__(self, feature: int, shards: Sequence[tuple[Shard, int, int]]) -> None:
        self.features: tuple[int, ...] = (feature,)
        self._shards = shards  # with the group that holds each, and its first row there
        self._pooling = shards[0][0].table.pooling

    def start(self, ids: BatchIds, items: Items) -> Finish:
        (feature,) = self.features
        ids_L, offsets = ids.feature(feature), ids.offsets(feature)
        weights_L = ids.weights(feature)
        pooling = self._pooling
        if pooling is Pooling.MEAN:  # partial means do not add up; partial sums of 1/n shares do
            lengths_B = offsets.diff()
            share_B = 1.0 / lengths_B.clamp(min=1).double()
            weights_L, pooling = torch.repeat_interleave(share_B, lengths_B), Pooling.SUM
        slots, lengths = [], []
        for shard, group, start in self._shards:
            mine_L = ids_L % shard.count == shard.index
            before = F.pad(mine_L.cumsum(0), (1, 0))
            rows = ids_L[mine_L] // shard.count + start
            bags = Bags(rows, before[offsets], None if weights_L is None else weights_L[mine_L], pooling)
            slots.append(_append(items, shard.worker, (group, bags)))
            lengths.append(before[offsets].diff())

        def finish(results: Results) -> Tensor:
            partial_BD = [results[worker][place] for worker, place in slots]
            if pooling is Pooling.MAX:
                return _largest(partial_BD, lengths).unsqueeze(1)
            return torch.stack(partial_BD).sum(0).unsqueeze(1)

        return finish


def _largest(partial_BD: list[Tensor], lengths: list[Tensor]) -> Tensor:
    """Maximum over shards, passing over those where a bag is empty; zeros where all are."""
    filled_SB1 = torch.stack(lengths).unsqueeze(2) > 0
    candidates_SBD = torch.stack(partial_BD).masked_fill(~filled_SB1, -torch.inf)
    return candidates_SBD.max(0).values.masked_fill(~filled_SB1.any(0), 0.0)


def make_routes(
    row_features: Sequence[int],
    bag_features: Sequence[int],
    tables: Sequence[TableSpec],
    placement: Placement,
) -> list[Route]:
    """The routes of a batch in which ``row_features`` hold one id a sample, and ``bag_features`` any number.

    Args:
        tables: the table of each feature, in feature order.
    """
    groups = {worker: placement.groups(worker) for worker in range(placement.num_workers)}
    routes: list[Route] = []
    for dim in sorted({tables[k].dim for k in row_features}):
        routes.append(RowRoute(tuple(k for k in row_features if tables[k].dim == dim), tables, groups))
    place = {
        (shard.table.name, shard.index): (shard, number, start)
        for worker_groups in groups.values()
        for number, group in enumerate(worker_groups)
        for shard, start in zip(group.shards, group.starts, strict=True)
    }
    whole: dict[tuple[int, int, Pooling], list[tuple[int, int]]] = {}
    for k in bag_features:
        shards = [place[tables[k].name, s.index] for s in placement.of_table(tables[k].name)]
        if len(shards) > 1:
            routes.append(SplitRoute(k, shards))
        else:
            shard, group, start = shards[0]
            whole.setdefault((shard.worker, group, tables[k].pooling), []).append((k, start))
    for (worker, group, pooling), members in whole.items():
        features, starts = zip(*members, strict=True)
        routes.append(PooledRoute(features, starts, worker, group, pooling))
    return routes
