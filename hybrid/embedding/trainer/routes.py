"""Where the ids of a batch go, and how the answers become vectors of samples.

A route covers some features. It adds the lookups it needs to the items of each worker, and returns what
joins the workers' answers to vectors of shape (B, its features, D), and takes their gradients apart. Two
kinds:

======== ====================== ============================== =====================================
route    features               asks a worker for              joins the answers by
======== ====================== ============================== =====================================
RowRoute exactly one id a       each distinct row once         spreading rows over samples
         sample
BagRoute multi-hot, tables on   a pooled vector a sample, or   nothing to join, or sum or max over
         the same workers       a partial one where the tables workers
                                are split
======== ====================== ============================== =====================================

Neither makes more messages, nor calls more kernels, for more tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding import loops
from hybrid.embedding.bags import Bags, Item, ids_dtype
from hybrid.embedding.placement import Placement, Shard, ShardGroup
from hybrid.embedding.spec import Pooling, TableSpec
from hybrid.errors import DataError

Items: TypeAlias = Mapping[int, list[Item]]
Results: TypeAlias = Mapping[int, Sequence[Tensor]]
Slot: TypeAlias = tuple[int, int]  # a worker, and the place in its answer


class BatchIds:
    """The ids of one batch, feature by feature.

    Attributes:
        ids_L: all ids, feature after feature.
        weights_L: the weight of each, or None.
        ends_K: where each feature's ids end.

    Raises:
        DataError: offsets or weights are not those of the ids.
    """

    def __init__(self, sparse: SparseFeatures) -> None:
        _check(sparse)
        self.batch_size = sparse.batch_size
        self.ids_L = sparse.ids_L.to(torch.int64).contiguous()
        self.weights_L = sparse.weights_L
        self._num_features = sparse.num_features
        self._offsets = None if sparse.offsets is None else sparse.offsets.to(torch.int64).contiguous()
        ends_K = torch.arange(1, sparse.num_features + 1) * self.batch_size
        self.ends_K = ends_K if self._offsets is None else self._offsets[ends_K]

    @property
    def offsets(self) -> Tensor:
        """Where each bag starts, feature after feature, (K * B + 1)."""
        return torch.arange(len(self.ids_L) + 1) if self._offsets is None else self._offsets

    def count(self, features: Sequence[int]) -> int:
        """How many ids some features have together."""
        return int(self.ends_K.diff(prepend=self.ends_K.new_zeros(1))[list(features)].sum())

    def single(self, features: Sequence[int]) -> Tensor:
        """Ids of features that hold one id a sample, (features, B)."""
        if self._offsets is None and len(features) == self._num_features:
            return self.ids_L.view(self._num_features, self.batch_size)
        ends = self.ends_K.tolist()
        return torch.stack([self.ids_L[ends[k] - self.batch_size : ends[k]] for k in features])


def _check(sparse: SparseFeatures) -> None:
    num_ids, offsets = len(sparse.ids_L), sparse.offsets
    if sparse.weights_L is not None and len(sparse.weights_L) != num_ids:
        raise DataError(f"a batch has {len(sparse.weights_L)} weights of {num_ids} ids")
    num_bags = num_ids if offsets is None else len(offsets) - 1
    if num_bags != sparse.batch_size * sparse.num_features:
        raise DataError(f"a batch of {sparse.num_features} sparse features has {num_bags} bags of ids")
    # What follows trusts them: compiled loops look no bounds up.
    if offsets is not None and (offsets[0] != 0 or offsets[-1] != num_ids or (offsets.diff() < 0).any()):
        raise DataError(f"the offsets of a batch must rise from 0 to {num_ids}, the number of its ids")


class Assembler(Protocol):
    """What turns the answers for one batch into vectors, and their gradients into gradients of answers.

    Attributes:
        shape_BFD: of the vectors.
    """

    @property
    def shape_BFD(self) -> tuple[int, int, int]: ...

    def vectors(self, results: Results) -> Tensor:
        """``vectors_BFD`` of the route's features."""
        ...

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        """The gradient of each answer, in no view of a larger tensor: RPC would send it whole."""
        ...


class Route(Protocol):
    """A way for some features; see the module's docstring."""

    features: tuple[int, ...]

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        """Append this route's lookups to ``items``; return what joins their answers."""
        ...


def _append(items: Items, worker: int, item: Item) -> Slot:
    items[worker].append(item)
    return worker, len(items[worker]) - 1


class RowRoute:
    """Features with one id a sample and one width: distinct rows travel once.

    Every row of every table gets an address: the groups that hold these lie one after another in one range
    of integers, so that a single sort finds the distinct rows of all features and of all workers.
    """

    def __init__(
        self,
        features: tuple[int, ...],
        tables: Sequence[TableSpec],
        groups: Mapping[int, Sequence[ShardGroup]],
    ) -> None:
        self.features = features
        self._dim = tables[features[0]].dim
        address_of: dict[tuple[str, int], int] = {}
        shards_of: dict[str, int] = {}
        self._segments: list[tuple[int, int, int, torch.dtype]] = []  # worker, group, its first address
        end = 0
        names = {tables[k].name for k in features}
        for worker, worker_groups in groups.items():
            for number, group in enumerate(worker_groups):
                if names.isdisjoint(shard.table.name for shard in group.shards):
                    continue
                for shard, start in zip(group.shards, group.starts, strict=True):
                    address_of[shard.table.name, shard.index] = end + start
                    shards_of[shard.table.name] = shard.count
                self._segments.append((worker, number, end, ids_dtype(group.num_rows)))
                end += group.num_rows
        self._num_rows = end
        self._dtype = ids_dtype(end)
        ends = torch.tensor([start for _, _, start, _ in self._segments[1:]] + [end], dtype=self._dtype)
        self._ends = ends.numpy()
        self._counts_K = np.array([shards_of[tables[k].name] for k in features])
        widest = range(self._counts_K.max())
        self._bases_KS = np.array(
            [[address_of.get((tables[k].name, s), 0) for s in widest] for k in features]
        )

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        addresses_BK = torch.empty(ids.batch_size, len(self.features), dtype=self._dtype)
        loops.addresses(
            ids.single(self.features).numpy(), self._bases_KS, self._counts_K, addresses_BK.numpy()
        )
        ids_U, starts_V, order_L = loops.group_ids(addresses_BK.view(-1).numpy(), self._num_rows)
        ends = np.searchsorted(ids_U, self._ends).tolist()
        slots = []
        for segment, start, end in zip(self._segments, [0, *ends[:-1]], ends, strict=True):
            worker, group, first, dtype = segment
            rows = torch.from_numpy(ids_U[start:end] - first).to(dtype)
            slots.append((_append(items, worker, (group, Bags(rows))), end - start))
        return _Rows(slots, starts_V, order_L, (*addresses_BK.shape, self._dim))


class _Rows(NamedTuple):
    """Joins by spreading the distinct rows over the ids; the gradients of equal ids add up.

    Attributes:
        slots: of the parts of the distinct rows, with the size of each.
        starts_V, order_L: where each distinct id stands, see ``loops.group_ids``.
    """

    slots: list[tuple[Slot, int]]
    starts_V: npt.NDArray[Any]
    order_L: npt.NDArray[Any]
    shape_BFD: tuple[int, int, int]

    def vectors(self, results: Results) -> Tensor:
        rows_UD = torch.cat([results[worker][place] for (worker, place), _ in self.slots])
        ranks_L = torch.from_numpy(loops.ranks(self.starts_V, self.order_L))
        return rows_UD.index_select(0, ranks_L).view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        grad_LD = grad_BFD.flatten(0, 1)
        parts, first = [], 0
        for slot, size in self.slots:
            part = grad_LD.new_empty(size, grad_LD.shape[1])
            starts_V = self.starts_V[first : first + size + 1]
            loops.sum_rows(starts_V, self.order_L, grad_LD.numpy(), part.numpy())
            parts.append((slot, part))
            first += size
        return parts


class _Place(NamedTuple):
    """A group of a worker, and for each of some features its table's shard there, with its first row."""

    worker: int
    number: int
    group: ShardGroup
    shards: Sequence[tuple[Shard, int]]


class BagRoute:
    """Multi-hot features of one pooling whose tables lie in the same groups of the same workers.

    Args:
        features: their numbers.
        places: each group, with the shard of each feature's table there and its first row.
        pooling: how bags become vectors.
    """

    def __init__(self, features: tuple[int, ...], places: Sequence[_Place], pooling: Pooling) -> None:
        self.features = features
        self._pooling = pooling
        self._dim = places[0].group.dim
        self._shards = [
            (
                place,
                np.array(
                    [
                        (feature, shard.index, shard.count, start)
                        for feature, (shard, start) in zip(features, place.shards, strict=True)
                    ]
                ),
            )
            for place in places
        ]

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        pooling, weights_L = self._pooling, ids.weights_L
        if pooling is Pooling.MEAN and len(self._shards) > 1:
            # Partial means do not add up; partial sums of 1/n shares do.
            lengths = ids.offsets.diff()
            share = 1.0 / lengths.clamp(min=1).double()  # rounded by the worker, to the type of its rows
            weights_L, pooling = torch.repeat_interleave(share, lengths), Pooling.SUM
        slots, offsets = [], []
        for place, shards_F4 in self._shards:
            bags = self._bags(ids, shards_F4, ids_dtype(place.group.num_rows), weights_L)._replace(
                pooling=pooling
            )
            slots.append(_append(items, place.worker, (place.number, bags)))
            offsets.append(bags.offsets)
        shape_BFD = (ids.batch_size, len(self.features), self._dim)
        if pooling is Pooling.MAX and len(slots) > 1:
            return _Largest(slots, shape_BFD, torch.stack([o.diff() for o in offsets if o is not None]) > 0)
        return _Sums(slots, shape_BFD)

    @staticmethod
    def _bags(
        ids: BatchIds, shards_F4: npt.NDArray[Any], dtype: torch.dtype, weights_L: Tensor | None
    ) -> Bags:
        """The bags of one group, sample after sample and within it feature after feature."""
        room = ids.count(shards_F4[:, 0].tolist())
        rows = torch.empty(room, dtype=dtype)
        offsets = torch.empty(ids.batch_size * len(shards_F4) + 1, dtype=dtype)
        positions = torch.empty(0 if weights_L is None else room, dtype=torch.int64)
        size = loops.gather_bags(
            ids.ids_L.numpy(),
            ids.offsets.numpy(),
            ids.batch_size,
            shards_F4,
            rows.numpy(),
            offsets.numpy(),
            positions.numpy(),
        )
        # RPC would send all the room that a part was cut from.
        rows = rows if size == room else rows[:size].clone()
        return Bags(rows, offsets, None if weights_L is None else weights_L[positions[:size]])


class _Sums:
    """Joins by adding up the parts of the workers, most often one."""

    def __init__(self, slots: list[Slot], shape_BFD: tuple[int, int, int]) -> None:
        self._slots = slots
        self.shape_BFD = shape_BFD

    def vectors(self, results: Results) -> Tensor:
        parts_ND = [results[worker][place] for worker, place in self._slots]
        joined_ND = parts_ND[0] if len(parts_ND) == 1 else torch.stack(parts_ND).sum(0)
        return joined_ND.view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        grad_ND = grad_BFD.flatten(0, 1)
        return [(slot, grad_ND) for slot in self._slots]


class _Largest:
    """Joins by the maximum over workers, passing over those where a bag is empty; zeros where all are.

    Args:
        filled_WN: whether each worker's part of each bag holds an id.
    """

    def __init__(self, slots: list[Slot], shape_BFD: tuple[int, int, int], filled_WN: Tensor) -> None:
        self._slots = slots
        self.shape_BFD = shape_BFD
        self._filled_WN1 = filled_WN.unsqueeze(2)
        self._winner_ND: Tensor

    def vectors(self, results: Results) -> Tensor:
        parts_WND = torch.stack([results[worker][place] for worker, place in self._slots])
        largest_ND, self._winner_ND = parts_WND.masked_fill(~self._filled_WN1, -torch.inf).max(0)
        largest_ND.masked_fill_(~self._filled_WN1.any(0), 0.0)
        return largest_ND.view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        grad_ND = grad_BFD.flatten(0, 1)
        return [(slot, grad_ND * (self._winner_ND == w)) for w, slot in enumerate(self._slots)]


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
    # For each table, the groups that hold it: worker, number of the group, shard, and where that begins.
    holders: dict[str, list[tuple[int, int, Shard, int]]] = {}
    for worker, worker_groups in groups.items():
        for number, group in enumerate(worker_groups):
            for shard, start in zip(group.shards, group.starts, strict=True):
                holders.setdefault(shard.table.name, []).append((worker, number, shard, start))
    alike: dict[tuple[tuple[tuple[int, int], ...], Pooling], list[int]] = {}
    for k in bag_features:
        where = tuple((worker, number) for worker, number, _, _ in holders[tables[k].name])
        alike.setdefault((where, tables[k].pooling), []).append(k)
    for (where, pooling), features in alike.items():
        places = []
        for i, (worker, number) in enumerate(where):
            shards = [holders[tables[k].name][i][2:] for k in features]
            places.append(_Place(worker, number, groups[worker][number], shards))
        routes.append(BagRoute(tuple(features), places, pooling))
    return routes
