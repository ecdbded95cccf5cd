"""Multi-hot features that workers pool."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags, ids_dtype
from hybrid.embedding.placement import Location
from hybrid.embedding.table_spec import Pooling
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.route import Assembler, Items, Responses, Slot, append


class BagRoute:
    """Route of multi-hot features of one pooling whose tables are in the same groups of the same workers.

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
        self._pooling = pooling
        self._is_weighted = is_weighted
        self._dim = locations[0][0].group.dim
        self._groups = []
        for group_locations in zip(*locations, strict=True):
            shards_F4 = [
                (k, at.shard.index, at.shard.count, at.start)
                for k, at in zip(features, group_locations, strict=True)
            ]
            self._groups.append((group_locations[0], np.array(shards_F4)))

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        pooling, weights_L = ids.pooling_weights(self._pooling, self._is_weighted, len(self._groups) > 1)
        slots, offsets = [], []
        for at, shards_F4 in self._groups:
            bags = _gather(ids, shards_F4, ids_dtype(at.group.num_rows), weights_L)
            slots.append(append(items, at.worker, (at.number, bags._replace(pooling=pooling))))
            offsets.append(bags.offsets)
        shape_BFD = (ids.batch_size, len(self.features), self._dim)
        if pooling is Pooling.MAX and len(slots) > 1:
            return _Maximum(slots, shape_BFD, torch.stack([o.diff() for o in offsets if o is not None]) > 0)
        return _Sum(slots, shape_BFD)


def _gather(ids: BatchIds, shards_F4: npt.NDArray[Any], dtype: torch.dtype, weights_L: Tensor | None) -> Bags:
    """Return the bags of one group, sample by sample and within a sample feature by feature."""
    capacity = ids.count(shards_F4[:, 0].tolist())
    rows = torch.empty(capacity, dtype=dtype)
    offsets = torch.empty(ids.batch_size * len(shards_F4) + 1, dtype=dtype)
    positions = torch.empty(0 if weights_L is None else capacity, dtype=torch.int64)
    size = kernels.gather_bags(
        ids.ids_L.numpy(),
        ids.offsets.numpy(),
        ids.batch_size,
        shards_F4,
        rows.numpy(),
        offsets.numpy(),
        positions.numpy(),
    )
    # A clone, because RPC sends the whole storage of a view.
    rows = rows if size == capacity else rows[:size].clone()
    return Bags(rows, offsets, None if weights_L is None else weights_L[positions[:size]])


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
