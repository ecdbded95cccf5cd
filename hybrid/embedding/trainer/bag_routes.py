"""Routes of multi-hot features: pooled by the workers that hold the rows, or by the trainer."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags, ids_dtype, pool_and_record
from hybrid.embedding.placement import Location
from hybrid.embedding.row_gradients import RowGradients
from hybrid.embedding.table_spec import Pooling
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.row_routes import (
    AddressSpace,
    Assembler,
    DistinctRows,
    Items,
    Responses,
    Route,
    Slot,
    append,
)


class MultiHotRoute(Route):
    """Base of the routes of multi-hot features of one pooling and one width.

    Args:
        features: indices of the features.
        locations: locations of the shards of each feature's table.
        pooling: how bags become vectors.
        is_weighted: whether the ids have weights.
    """

    def __init__(
        self,
        features: tuple[int, ...],
        locations: Sequence[Sequence[Location]],
        pooling: Pooling,
        is_weighted: bool,
    ) -> None:
        self.features = features
        self._pooling = pooling
        self._is_weighted = is_weighted
        self._prepare(locations)

    def _prepare(self, locations: Sequence[Sequence[Location]]) -> None:
        """Compute what does not depend on the batch."""
        raise NotImplementedError


class BagRoute(MultiHotRoute):
    """Route of features that workers pool, of tables in the same groups of the same workers."""

    def _prepare(self, locations: Sequence[Sequence[Location]]) -> None:
        self._groups = []
        for of_group in zip(*locations, strict=True):
            features = zip(self.features, of_group, strict=True)
            shards_F4 = np.array([(k, at.shard.index, at.shard.count, at.start) for k, at in features])
            self._groups.append((of_group[0], shards_F4))

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        pooling, weights_L = ids.pooling_weights(self._pooling, self._is_weighted, len(self._groups) > 1)
        capacity = ids.count(self.features)
        slots, lengths = [], []
        for at, shards_F4 in self._groups:
            rows = torch.empty(capacity, dtype=ids_dtype(at.group.num_rows))
            offsets = rows.new_empty(ids.batch_size * len(self.features) + 1)
            positions = torch.empty(0 if weights_L is None else capacity, dtype=torch.int64)
            out = rows.numpy(), offsets.numpy(), positions.numpy()
            size = kernels.gather_bags(
                ids.ids_L.numpy(), ids.offsets.numpy(), ids.batch_size, shards_F4, *out
            )
            # A clone, because RPC sends the whole storage of a view.
            rows = rows if size == capacity else rows[:size].clone()
            weights = None if weights_L is None else weights_L[positions[:size]]
            slots.append(append(items, at.worker, (at.number, Bags(rows, offsets, weights, pooling))))
            lengths.append(offsets.diff())
        shape_BFD = (ids.batch_size, len(self.features), self._groups[0][0].group.dim)
        if pooling is Pooling.MAX and len(slots) > 1:
            return _Maximum(slots, shape_BFD, torch.stack(lengths) > 0)
        return _Sum(slots, shape_BFD)


class _Sum:
    """Assembles by adding the partial sums of the workers; most often there is one worker."""

    def __init__(self, slots: list[Slot], shape_BFD: tuple[int, int, int]) -> None:
        self._slots = slots
        self.shape_BFD = shape_BFD

    def vectors(self, responses: Responses) -> Tensor:
        parts_ND = [responses[worker][index] for worker, index in self._slots]
        sums_ND = parts_ND[0] if len(parts_ND) == 1 else torch.stack(parts_ND).sum(0)
        return sums_ND.view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        grad_ND = grad_BFD.flatten(0, 1)
        return [(slot, grad_ND) for slot in self._slots]


class _Maximum:
    """Assembles by the maximum over the workers that hold an id of a bag; zeros for empty bags.

    Args:
        filled_WN: whether each worker holds an id of each bag.
    """

    def __init__(self, slots: list[Slot], shape_BFD: tuple[int, int, int], filled_WN: Tensor) -> None:
        self._slots = slots
        self.shape_BFD = shape_BFD
        self._filled_WN1 = filled_WN.unsqueeze(2)
        self._winner_ND: Tensor

    def vectors(self, responses: Responses) -> Tensor:
        parts_WND = torch.stack([responses[worker][index] for worker, index in self._slots])
        maximum_ND, self._winner_ND = parts_WND.masked_fill(~self._filled_WN1, -torch.inf).max(0)
        maximum_ND.masked_fill_(~self._filled_WN1.any(0), 0.0)
        return maximum_ND.view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        grad_ND = grad_BFD.flatten(0, 1)
        return [(slot, grad_ND * (self._winner_ND == w)) for w, slot in enumerate(self._slots)]


class PoolRoute(MultiHotRoute):
    """Route of features that the trainer pools, from distinct rows."""

    def _prepare(self, locations: Sequence[Sequence[Location]]) -> None:
        self._features_F = np.array(self.features)
        self._space = AddressSpace(locations)

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        space = self._space
        pooling, weights_L = ids.pooling_weights(self._pooling, self._is_weighted)
        size, num_bags = ids.count(self.features), ids.batch_size * len(self.features)
        addresses_L = torch.empty(size, dtype=space.dtype)
        offsets = torch.empty(num_bags + 1, dtype=torch.int32)
        positions_L = torch.empty(0 if weights_L is None else size, dtype=torch.int64)
        space.write_bags(ids, self._features_F, addresses_L, offsets, positions_L)
        rows = space.request(addresses_L, items)
        weights_L = None if weights_L is None else weights_L[positions_L]
        shape_BFD = (ids.batch_size, len(self.features), space.dim)
        return _PooledRows(rows, offsets, weights_L, pooling, shape_BFD)


class _PooledRows:
    """Assembles by pooling the distinct rows, as a worker pools those of a table.

    Args:
        rows: the distinct rows, and their positions among all ids, bag by bag.
        offsets: int32, where each bag starts, (B * F + 1).
        weights_L: weight of each id, or None.
    """

    def __init__(
        self,
        rows: DistinctRows,
        offsets: Tensor,
        weights_L: Tensor | None,
        pooling: Pooling,
        shape_BFD: tuple[int, int, int],
    ) -> None:
        self._rows = rows
        self._offsets = offsets
        self._weights_L = weights_L
        self._pooling = pooling
        self.shape_BFD = shape_BFD
        self._bags: Bags  # of indices among the distinct rows; set by vectors()

    def vectors(self, responses: Responses) -> Tensor:
        rows_UD, ranks_L = self._rows.received(responses)
        bags = Bags(ranks_L, self._offsets, self._weights_L, self._pooling)
        pooled_ND, self._bags = pool_and_record(rows_UD, bags)
        return pooled_ND.view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        starts_V, order_L = self._rows.starts_V, self._rows.order_L
        ranks_U = np.arange(len(starts_V) - 1, dtype=order_L.dtype)
        gradients = RowGradients(self._bags, grad_BFD.flatten(0, 1), (ranks_U, starts_V, order_L))
        parts, first = [], 0
        for slot, size in self._rows.slots:
            parts.append((slot, gradients.block(first, first + size)[0]))
            first += size
        return parts
