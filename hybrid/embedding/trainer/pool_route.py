"""Multi-hot features that the trainer pools, from distinct rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid.embedding.bags import Bags, pool_and_record
from hybrid.embedding.placement import Location
from hybrid.embedding.row_gradients import RowGradients
from hybrid.embedding.table_spec import Pooling
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.route import Assembler, Items, Responses, Slot
from hybrid.embedding.trainer.row_route import AddressSpace, DistinctRows


class PoolRoute:
    """Route of multi-hot features of one pooling and one width.

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
        *,
        is_weighted: bool,
    ) -> None:
        self.features = features
        self._features_F = np.array(features)
        self._space = AddressSpace(locations)
        self._pooling = pooling
        self._is_weighted = is_weighted

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        pooling, weights_L = ids.pooling_weights(self._pooling, self._is_weighted)
        size, num_bags = ids.count(self.features), ids.batch_size * len(self.features)
        addresses_L = torch.empty(size, dtype=self._space.dtype)
        offsets = torch.empty(num_bags + 1, dtype=torch.int32)
        positions_L = torch.empty(0 if weights_L is None else size, dtype=torch.int64)
        self._space.write_bags(ids, self._features_F, addresses_L, offsets, positions_L)
        rows = self._space.request(addresses_L, items)
        weights_L = None if weights_L is None else weights_L[positions_L]
        shape_BFD = (ids.batch_size, len(self.features), self._space.dim)
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
