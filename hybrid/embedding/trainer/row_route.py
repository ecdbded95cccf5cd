"""Features with one id per sample: each distinct row travels once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags, ids_dtype
from hybrid.embedding.kernels import Ints
from hybrid.embedding.placement import Location
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.route import Assembler, Items, Responses, Slot, append


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
