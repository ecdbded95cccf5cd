"""Routes, which convert ids of a batch to requests, and their assemblers, which convert responses to vectors.

A route covers ``features``. ``request`` adds requests to the messages of workers, and returns an assembler.
The assembler turns responses into vectors of shape (B, features, D), and gradients of vectors into gradients
of responses. A sequence counts as one feature per position. No gradient is a slice of a larger tensor, since
RPC would send the whole storage. These are the kinds of routes:

============= ======================== ============================== ==================================
route         features                 requests from a worker         assembles responses by
============= ======================== ============================== ==================================
RowRoute      one id per sample        each distinct row once         copying rows to the samples
SequenceRoute the same, and sequences  the same                       the same, to positions of samples
BagRoute      multi-hot, tables on     a pooled vector per sample;    taking the vectors, or adding them
              the same workers         a partial one if the tables    over workers
                                       are split over workers
PoolRoute     multi-hot, of tables     each distinct row once         pooling rows
              that trainers pool
============= ======================== ============================== ==================================

A sequence of at most N ids has N positions in a sample. Positions after its last id are zeros, and read no
row. Features with one id per sample and the same width join the route of sequences, with one position each.
So if a history contains the candidate item, the row is sent once::

    history of up to 3 ids, item    [ 4 7 . | 7 ]   [ . . . | 2 ]        rows that are sent   2 4 7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags, Item, ids_dtype, pool_and_record
from hybrid.embedding.kernels import Ints
from hybrid.embedding.placement import Location
from hybrid.embedding.row_gradients import GroupedBags, RowGradients
from hybrid.embedding.table_spec import Pooling
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.primitives.key_hashes import KEY_BITS

Items: TypeAlias = Mapping[int, list[Item]]
Responses: TypeAlias = Mapping[int, Sequence[Tensor]]
Slot: TypeAlias = tuple[int, int]  # a worker, and the index of a tensor in its response
Locations: TypeAlias = Sequence[Sequence[Location]]  # locations of the shards of each feature's table


def append(items: Items, worker: int, item: Item) -> Slot:
    """Append a request to a worker's message; return the worker, and the index of the response."""
    items[worker].append(item)
    return worker, len(items[worker]) - 1


class AddressSpace:
    """Integer addresses for all rows of several tables of one width.

    Each ``ShardGroup`` with one of these tables has a segment of the address range. So one sort finds the
    distinct rows of all tables and workers. A growing table has a separate address space: the addresses are
    its keys, and each shard has a segment of the keys. ``locations`` may repeat a table.
    """

    def __init__(self, locations: Locations) -> None:
        self.dim = locations[0][0].group.dim
        if locations[0][0].shard.table.growth is not None:
            self._address_keys(locations)
            return
        groups = {(at.worker, at.group_number): at.group for shards in locations for at in shards}
        first: dict[tuple[int, int], int] = {}  # first address of each group
        self._segments: list[tuple[int, int, int, torch.dtype]] = []  # worker, group, its first address
        end = 0
        for (worker, number), group in sorted(groups.items(), key=lambda item: item[0]):
            first[worker, number] = end
            self._segments.append((worker, number, end, ids_dtype(group.num_rows)))
            end += group.num_rows
        self._addresses_end = end
        self.dtype = ids_dtype(end)
        starts = torch.tensor([start for _, _, start, _ in self._segments], dtype=self.dtype)
        self._starts = starts.numpy()
        self.counts_K = np.array([len(shards) for shards in locations])
        self.bases_KS = np.zeros((len(locations), self.counts_K.max()), np.int64)
        for k, shards in enumerate(locations):
            for at in shards:
                self.bases_KS[k, at.shard.index] = first[at.worker, at.group_number] + at.start

    def _address_keys(self, locations: Locations) -> None:
        shards = sorted(locations[0], key=lambda at: at.shard.index)
        self._segments = [(at.worker, at.group_number, 0, torch.int64) for at in shards]
        self._addresses_end = kernels.KEYS_END
        self.dtype = torch.int64
        self._starts = np.array([at.shard.buckets.start << KEY_BITS for at in shards], np.uint64)
        self.counts_K = np.ones(len(locations), np.int64)
        self.bases_KS = np.zeros((len(locations), 1), np.int64)

    def write(self, ids_KB: Tensor, first: int, out_BK: Tensor) -> None:
        """Write the addresses of ids; row k of ``ids_KB`` belongs to table ``first + k``."""
        tables = slice(first, first + len(ids_KB))
        bases_KS = self.bases_KS[tables]
        counts_K = self.counts_K[tables]
        kernels.write_addresses(ids_KB.numpy(), bases_KS, counts_K, out_BK.numpy())

    def request(self, addresses_L: Tensor, shape_BFD: tuple[int, int, int], items: Items) -> RowAssembler:
        """Append requests for the distinct rows at these addresses to ``items``; return their assembler.

        Args:
            shape_BFD: shape of the vectors that the assembler makes, with one vector per address.
        """
        ids_U, starts_V, order_L = kernels.group_ids(addresses_L.numpy(), self._addresses_end)
        starts = np.searchsorted(ids_U.view(self._starts.dtype), self._starts).tolist()
        slots = []
        for segment, start, end in zip(self._segments, starts, [*starts[1:], len(ids_U)], strict=True):
            worker, group, first, dtype = segment
            rows = torch.from_numpy(ids_U[start:end] - first).to(dtype)
            slots.append((append(items, worker, (group, Bags(rows))), start, end))
        return RowAssembler(slots, starts_V, order_L, shape_BFD)


class RowAssembler(NamedTuple):
    """Assembler that copies each received row to all positions of its id."""

    # Response slots, each with start and end of its rows among all distinct rows.
    slots: list[tuple[Slot, int, int]]
    # starts_V, order_L: positions of each distinct id; see kernels.group_ids.
    starts_V: Ints
    order_L: Ints
    shape_BFD: tuple[int, int, int]

    def collect(self, responses: Responses) -> tuple[Tensor, Tensor]:
        """Return the distinct rows, (U, D), and for each id the index of its row among them."""
        return torch.cat(self.parts(responses)), self.ranks()

    def parts(self, responses: Responses) -> list[Tensor]:
        """Return the distinct rows, one tensor for each request."""
        return [responses[worker][index] for (worker, index), _, _ in self.slots]

    def ranks(self) -> Tensor:
        """Return, for each id, the index of its row among the distinct rows."""
        return torch.from_numpy(kernels.rank_ids(self.starts_V, self.order_L))

    def vectors(self, responses: Responses) -> Tensor:
        """Return the vector of each id, in the shape ``shape_BFD``."""
        rows_UD, ranks_L = self.collect(responses)
        return rows_UD.index_select(0, ranks_L).view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        """Return the gradients of the responses, summed over equal ids. ``grad_BFD`` can also be (L, D)."""
        single_ids = Bags(torch.from_numpy(self.order_L))  # without offsets, each id is a bag
        return self.gradients_of_bags(single_ids, grad_BFD.flatten(0, -2))

    def gradients_of_bags(self, bags: Bags, grad_ND: Tensor) -> list[tuple[Slot, Tensor]]:
        """Return the gradient of each response, given the gradients of the pooled vectors of ``bags``."""
        ranks_U = np.arange(len(self.starts_V) - 1, dtype=self.order_L.dtype)
        grouped = GroupedBags(bags, (ranks_U, self.starts_V, self.order_L), grad_ND.dtype)
        gradients = RowGradients(grouped, grad_ND)
        return [(slot, gradients.sum_block(first, last)[0]) for slot, first, last in self.slots]


class RowRoute:
    """The route of features of one width with one id per sample."""

    def __init__(self, features: tuple[int, ...], locations: Locations) -> None:
        self.features = features
        self._space = AddressSpace(locations)

    def request(self, ids: BatchIds, items: Items) -> Assembler:
        """Append requests for the distinct rows to ``items``; return the assembler of the responses."""
        addresses_BK = torch.empty(ids.batch_size, len(self.features), dtype=self._space.dtype)
        self._space.write(ids.single(self.features), 0, addresses_BK)
        return self._space.request(addresses_BK.view(-1), (*addresses_BK.shape, self._space.dim), items)


class SequenceRoute:
    """The route of features of one width: some are sequences, the others have one id per sample.

    Args:
        sizes_F: number of positions of each feature: the maximum length of a sequence, else 1.
    """

    def __init__(self, features: tuple[int, ...], locations: Locations, sizes_F: Sequence[int]) -> None:
        self.features = features
        self._space = AddressSpace(locations)
        *self._first_F, self._num_positions = accumulate(sizes_F, initial=0)

    def request(self, ids: BatchIds, items: Items) -> Assembler:
        """Append requests for the distinct rows to ``items``; return the assembler of the responses."""
        bounds = [ids.bounds(k) for k in self.features]
        parts = [slice(int(of_bags[0]), int(of_bags[-1])) for of_bags in bounds]
        addresses_L = torch.empty(sum(p.stop - p.start for p in parts), dtype=self._space.dtype)
        out = addresses_L.split([p.stop - p.start for p in parts])
        positions = []  # for each feature, the position of each id among all positions of all samples
        for number, (part, out_L) in enumerate(zip(parts, out, strict=True)):
            self._space.write(ids.ids_L[part].view(1, -1), number, out_L.view(-1, 1))
            starts_B = bounds[number][:-1] - part.start
            lengths_B = bounds[number].diff()
            shifts_B = torch.arange(len(starts_B)) * self._num_positions + self._first_F[number] - starts_B
            positions.append(torch.arange(len(out_L)) + shifts_B.repeat_interleave(lengths_B))
        weights_L = None
        if ids.weights_L is not None and not ids.weighted_features.isdisjoint(self.features):
            weights_L = torch.cat([ids.weights_L[part] for part in parts])
        shape_BFD = (ids.batch_size, self._num_positions, self._space.dim)
        rows = self._space.request(addresses_L, shape_BFD, items)
        return _SequenceAssembler(rows, torch.cat(positions), weights_L)


class _SequenceAssembler(NamedTuple):
    """Assembler that copies the row of each id to the id's position. Positions without an id get zeros."""

    rows: RowAssembler
    positions_L: Tensor  # position of each id among all positions of all samples
    weights_L: Tensor | None  # weight of each id, or None for ones

    @property
    def shape_BFD(self) -> tuple[int, int, int]:
        return self.rows.shape_BFD

    def vectors(self, responses: Responses) -> Tensor:
        rows_UD, ranks_L = self.rows.collect(responses)
        size, num_positions, dim = self.shape_BFD
        row_of_position = torch.full((size * num_positions,), len(rows_UD), dtype=torch.int32)
        row_of_position.index_copy_(0, self.positions_L, ranks_L)
        # The row after the last one is zeros, for positions without an id.
        rows_VD = torch.cat([rows_UD, rows_UD.new_zeros(1, dim)])
        vectors = rows_VD.index_select(0, row_of_position)
        if self.weights_L is not None:
            vectors[self.positions_L] *= self.weights_L.unsqueeze(1).to(vectors)
        return vectors.view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        grads = grad_BFD.flatten(0, 1)
        if self.weights_L is not None:
            grad_LD = grads.index_select(0, self.positions_L) * self.weights_L.unsqueeze(1).to(grads)
            return self.rows.gradients(grad_LD)
        # Gradients are summed directly from their positions, without a copy in the order of the ids.
        sources_L = self.positions_L.to(torch.int32).index_select(0, torch.from_numpy(self.rows.order_L))
        return self.rows._replace(order_L=sources_L.numpy()).gradients(grads)


class BagRoute:
    """The route of features that workers pool. All tables are in the same :class:`ShardGroup` objects."""

    def __init__(
        self, features: tuple[int, ...], locations: Locations, pooling: Pooling, is_weighted: bool
    ) -> None:
        self.features = features
        self._pooling = pooling
        self._is_weighted = is_weighted
        self._counts_F = np.array([len(shards) for shards in locations])
        self._groups = []  # for each group, a location in it, and the first row of each feature's shard
        for of_group in zip(*locations, strict=True):
            bases_FS = np.full((len(features), self._counts_F.max()), -1)
            for f, at in enumerate(of_group):
                bases_FS[f, at.shard.index] = at.start
            self._groups.append((of_group[0], bases_FS))

    def request(self, ids: BatchIds, items: Items) -> Assembler:
        """Append a request to ``items`` for each ``ShardGroup``; return the assembler of the responses."""
        is_partial = len(self._groups) > 1
        pooling, weights_L = ids.pooling_weights(self._pooling, self._is_weighted, is_partial)
        slots = []
        for at, bases_FS in self._groups:
            dtype = ids_dtype(at.group.num_rows)
            bags = ids.bags(self.features, bases_FS, self._counts_F, weights_L, pooling, dtype, dtype)
            slots.append(append(items, at.worker, (at.group_number, bags)))
        dim = self._groups[0][0].group.dim
        return _BagAssembler(slots, (ids.batch_size, len(self.features), dim))


class _BagAssembler(NamedTuple):
    """Assembler of vectors that workers have pooled. It adds the partial vectors of a split table."""

    slots: list[Slot]
    shape_BFD: tuple[int, int, int]

    def vectors(self, responses: Responses) -> Tensor:
        parts_ND = [responses[worker][index] for worker, index in self.slots]
        sums_ND = parts_ND[0] if len(parts_ND) == 1 else torch.stack(parts_ND).sum(0)
        return sums_ND.view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        grad_ND = grad_BFD.flatten(0, 1)
        return [(slot, grad_ND) for slot in self.slots]


class PoolRoute:
    """The route of features of one width that the trainer pools."""

    def __init__(
        self, features: tuple[int, ...], locations: Locations, pooling: Pooling, is_weighted: bool
    ) -> None:
        self.features = features
        self._pooling = pooling
        self._is_weighted = is_weighted
        self._space = AddressSpace(locations)

    def request(self, ids: BatchIds, items: Items) -> Assembler:
        """Append requests for the distinct rows to ``items``; return an assembler, which pools the rows."""
        space = self._space
        pooling, weights_L = ids.pooling_weights(self._pooling, self._is_weighted)
        dtypes = space.dtype, torch.int32
        bags = ids.bags(self.features, space.bases_KS, space.counts_K, weights_L, pooling, *dtypes)
        rows = space.request(bags.ids_L, (ids.batch_size, len(self.features), space.dim), items)
        return _PoolAssembler(rows, bags)


@dataclass(eq=False, slots=True)
class _PoolAssembler:
    """Assembler that pools the received rows on the trainer."""

    rows: RowAssembler  # the distinct rows, and the positions of their ids, which are sorted by bag
    bags: Bags  # of addresses; from vectors() on, of indices of distinct rows

    @property
    def shape_BFD(self) -> tuple[int, int, int]:
        return self.rows.shape_BFD

    def vectors(self, responses: Responses) -> Tensor:
        rows_UD, ranks_L = self.rows.collect(responses)
        pooled_ND, self.bags = pool_and_record(rows_UD, self.bags._replace(ids_L=ranks_L))
        return pooled_ND.view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        return self.rows.gradients_of_bags(self.bags, grad_BFD.flatten(0, 1))


# ``request(ids, items)`` appends the requests for the ids of a batch to ``items``, a list per worker. It
# returns an assembler for the responses.
Route: TypeAlias = RowRoute | SequenceRoute | BagRoute | PoolRoute
# ``vectors(responses)`` returns the vectors of the features, (samples, features, dim).
# ``gradients(grad_BFD)`` returns the gradient for each item sent to a worker.
Assembler: TypeAlias = RowAssembler | _SequenceAssembler | _BagAssembler | _PoolAssembler
