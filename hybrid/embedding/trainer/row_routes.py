"""Routes: which requests the ids of a batch become, and how responses become vectors of samples.

A route covers some features. It adds its requests to the message of each worker, and returns an assembler.
The assembler turns responses into vectors of shape (B, features, D), and gradients of vectors into gradients
of responses. A sequence has one vector per position instead of one. The kinds:

============= ======================== ============================== ===================================
route         features                 requests from a worker         assembles responses by
============= ======================== ============================== ===================================
RowRoute      one id per sample        each distinct row once         copying rows to the samples
SequenceRoute the same, and sequences  the same                       the same, to positions of samples
LengthRoute   sequences                nothing                        counting ids
BagRoute      multi-hot, tables on     a pooled vector per sample;    nothing; sum or max over workers if
              the same workers         a partial one if the tables    tables are split
                                       are split over workers
PoolRoute     multi-hot, of tables     each distinct row once         pooling rows
              that trainers pool
============= ======================== ============================== ===================================

The number of messages and of kernel calls does not depend on the number of tables.

A sequence of at most N ids has N positions in a sample; those after its last id are zeros, and read no row.
Features of the same width with one id per sample share its route, with one position each, so that a row which
a history and its candidate share travels once::

    history of up to 3 ids, item    [ 4 7 . | 7 ]   [ . . . | 2 ]        rows that travel   2 4 7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags, Item, ids_dtype
from hybrid.embedding.kernels import Ints
from hybrid.embedding.placement import Location
from hybrid.embedding.trainer.batch_ids import BatchIds

Items: TypeAlias = Mapping[int, list[Item]]
Responses: TypeAlias = Mapping[int, Sequence[Tensor]]
Slot: TypeAlias = tuple[int, int]  # a worker, and the index of a tensor in its response


class Assembler(Protocol):
    """Turns the responses for one batch into vectors, and gradients of vectors into those of responses.

    Attributes:
        shape_BFD: shape of the vectors.
    """

    @property
    def shape_BFD(self) -> tuple[int, int, int]: ...

    def vectors(self, responses: Responses) -> Tensor:
        """Return ``vectors_BFD`` of the route's features, or of the positions of its sequences."""
        ...

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        """Return the gradient of each response tensor; none is a view, since RPC sends whole storages."""
        ...


class Route(Protocol):
    """The route of some features; see the module's docstring."""

    features: tuple[int, ...]

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        """Append this route's requests to ``items``, and return the assembler of their responses."""
        ...


def append(items: Items, worker: int, item: Item) -> Slot:
    """Append a request to a worker's message, and return the slot of its response."""
    items[worker].append(item)
    return worker, len(items[worker]) - 1


class AddressSpace:
    """An integer address for every row of some tables of one width.

    The groups with these tables follow each other in one range of integers, so that one sort finds the
    distinct rows of all tables and workers.

    Args:
        locations: locations of the shards of each table; a table may occur several times.
    """

    def __init__(self, locations: Sequence[Sequence[Location]]) -> None:
        groups = {(at.worker, at.number): at.group for shards in locations for at in shards}
        first: dict[tuple[int, int], int] = {}  # first address of each group
        self._segments: list[tuple[int, int, int, torch.dtype]] = []  # worker, group, its first address
        end = 0
        for (worker, number), group in sorted(groups.items(), key=lambda item: item[0]):
            first[worker, number] = end
            self._segments.append((worker, number, end, ids_dtype(group.num_rows)))
            end += group.num_rows
        self._num_rows, self.dtype = end, ids_dtype(end)
        ends = torch.tensor([start for _, _, start, _ in self._segments[1:]] + [end], dtype=self.dtype)
        self._ends = ends.numpy()
        self.dim = locations[0][0].group.dim
        self._counts_K = np.array([len(shards) for shards in locations])
        self._bases_KS = np.zeros((len(locations), self._counts_K.max()), np.int64)
        for k, shards in enumerate(locations):
            for at in shards:
                self._bases_KS[k, at.shard.index] = first[at.worker, at.number] + at.start

    def write(self, ids_KB: Tensor, first: int, out_BK: Tensor) -> None:
        """Write the addresses of ids of the tables from index ``first`` on."""
        tables = slice(first, first + len(ids_KB))
        bases_KS, counts_K = self._bases_KS[tables], self._counts_K[tables]
        kernels.addresses(ids_KB.numpy(), bases_KS, counts_K, out_BK.numpy())

    def write_bags(
        self, ids: BatchIds, features_F: Ints, out_L: Tensor, out_offsets: Tensor, out_positions: Tensor
    ) -> None:
        """Write the addresses of bags of features, one per table; see :func:`kernels.bag_addresses`."""
        tables = features_F, self._bases_KS, self._counts_K
        out = out_L.numpy(), out_offsets.numpy(), out_positions.numpy()
        kernels.bag_addresses(ids.ids_L.numpy(), ids.offsets.numpy(), ids.batch_size, *tables, *out)

    def request(self, addresses_L: Tensor, items: Items) -> DistinctRows:
        """Append a request for each distinct row to ``items``."""
        ids_U, starts_V, order_L = kernels.group_ids(addresses_L.numpy(), self._num_rows)
        ends = np.searchsorted(ids_U, self._ends).tolist()
        slots = []
        for segment, start, end in zip(self._segments, [0, *ends[:-1]], ends, strict=True):
            worker, group, first, dtype = segment
            rows = torch.from_numpy(ids_U[start:end] - first).to(dtype)
            slots.append((append(items, worker, (group, Bags(rows))), end - start))
        return DistinctRows(slots, starts_V, order_L)


class RowRoute:
    """Route of features of one width with one id per sample.

    Args:
        features: indices of the features.
        locations: locations of the shards of each feature's table.
    """

    def __init__(self, features: tuple[int, ...], locations: Sequence[Sequence[Location]]) -> None:
        self.features = features
        self._space = AddressSpace(locations)

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        addresses_BK = torch.empty(ids.batch_size, len(self.features), dtype=self._space.dtype)
        self._space.write(ids.single(self.features), 0, addresses_BK)
        rows = self._space.request(addresses_BK.view(-1), items)
        return _CopiedRows(rows, (*addresses_BK.shape, self._space.dim))


class DistinctRows(NamedTuple):
    """Requested distinct rows, and the ids that they belong to.

    Attributes:
        slots: response slots of the rows, with the number of rows in each.
        starts_V, order_L: positions of each distinct id; see :func:`kernels.group_ids`.
    """

    slots: list[tuple[Slot, int]]
    starts_V: npt.NDArray[Any]
    order_L: npt.NDArray[Any]

    def received(self, responses: Responses) -> tuple[Tensor, Tensor]:
        """Return ``rows_UD``, and for each id the index of its row among them."""
        rows_UD = torch.cat([responses[worker][index] for (worker, index), _ in self.slots])
        return rows_UD, torch.from_numpy(kernels.ranks(self.starts_V, self.order_L))

    def gradients(self, grad_LD: Tensor) -> list[tuple[Slot, Tensor]]:
        """Return the gradients of the rows of each slot: sums over equal ids."""
        parts, first = [], 0
        for slot, size in self.slots:
            part = grad_LD.new_empty(size, grad_LD.shape[1])
            starts_V = self.starts_V[first : first + size + 1]
            kernels.sum_rows(starts_V, self.order_L, grad_LD.numpy(), part.numpy())
            parts.append((slot, part))
            first += size
        return parts


class _CopiedRows(NamedTuple):
    """Assembles by copying the distinct rows to the samples."""

    rows: DistinctRows
    shape_BFD: tuple[int, int, int]

    def vectors(self, responses: Responses) -> Tensor:
        rows_UD, ranks_L = self.rows.received(responses)
        return rows_UD.index_select(0, ranks_L).view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        return self.rows.gradients(grad_BFD.flatten(0, 1))


class SequenceRoute:
    """Route of features of one width: sequences, and features with one id per sample.

    Args:
        features: indices of the features.
        locations: locations of the shards of each feature's table.
        sizes_F: number of vectors of each feature in a sample; the maximum length of a sequence.
    """

    def __init__(
        self, features: tuple[int, ...], locations: Sequence[Sequence[Location]], sizes_F: Sequence[int]
    ) -> None:
        self.features = features
        self._space = AddressSpace(locations)
        *self._first_F, self._num_positions = accumulate(sizes_F, initial=0)

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        bounds = [ids.bounds(k) for k in self.features]
        parts = [slice(int(of_bags[0]), int(of_bags[-1])) for of_bags in bounds]
        addresses_L = torch.empty(sum(p.stop - p.start for p in parts), dtype=self._space.dtype)
        out = addresses_L.split([p.stop - p.start for p in parts])
        positions = []  # of the ids of each feature among those of all samples
        for number, (part, out_L) in enumerate(zip(parts, out, strict=True)):
            self._space.write(ids.ids_L[part].view(1, -1), number, out_L.view(-1, 1))
            starts_B, lengths_B = bounds[number][:-1] - part.start, bounds[number].diff()
            shifts_B = torch.arange(len(starts_B)) * self._num_positions + self._first_F[number] - starts_B
            positions.append(torch.arange(len(out_L)) + shifts_B.repeat_interleave(lengths_B))
        weights_L = None
        if ids.weights_L is not None and not ids.weighted.isdisjoint(self.features):
            weights_L = torch.cat([ids.weights_L[part] for part in parts])
        return _Sequences(
            self._space.request(addresses_L, items),
            torch.cat(positions),
            weights_L,
            (ids.batch_size, self._num_positions, self._space.dim),
        )


class _Sequences(NamedTuple):
    """Assembles by copying the row of each id to its position.

    Attributes:
        positions_L: position of each id.
        weights_L: weight of each id, or None for ones.
    """

    rows: DistinctRows
    positions_L: Tensor
    weights_L: Tensor | None
    shape_BFD: tuple[int, int, int]

    def vectors(self, responses: Responses) -> Tensor:
        rows_UD, ranks_L = self.rows.received(responses)
        size, num_positions, dim = self.shape_BFD
        row_of_position = torch.full((size * num_positions,), len(rows_UD), dtype=torch.int32)
        row_of_position.index_copy_(0, self.positions_L, ranks_L)
        # The last row is for positions without an id.
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
        # The gradients are summed from their positions, without a copy in the order of the ids.
        sources_L = self.positions_L.to(torch.int32).index_select(0, torch.from_numpy(self.rows.order_L))
        return self.rows._replace(order_L=sources_L.numpy()).gradients(grads)


class LengthRoute:
    """Route of the lengths of sequences, which are known without a request."""

    def __init__(self, features: tuple[int, ...]) -> None:
        self.features = features

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        lengths_BF = torch.stack([ids.bounds(k).diff() for k in self.features], dim=1)
        return _Lengths(lengths_BF.unsqueeze(2))


class _Lengths(NamedTuple):
    """Vectors of one number: the length."""

    lengths_BF1: Tensor

    @property
    def shape_BFD(self) -> tuple[int, int, int]:
        size, num_features, one = self.lengths_BF1.shape
        return size, num_features, one

    def vectors(self, responses: Responses) -> Tensor:
        tensors = (tensor for of_worker in responses.values() for tensor in of_worker)
        return self.lengths_BF1.to(next(tensors).dtype)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        return []
