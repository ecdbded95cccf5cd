"""Features that hold exactly one id a sample: distinct rows travel once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.embedding import loops
from hybrid.embedding.bags import Bags, ids_dtype
from hybrid.embedding.placement import Location
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.route import Assembler, Items, Results, Slot, append


class RowRoute:
    """Features with one id a sample and one width: distinct rows travel once.

    Every row of every table gets an address: the groups that hold these lie one after another in one range
    of integers, so that a single sort finds the distinct rows of all features and of all workers.

    Args:
        features: their numbers.
        locations: where the shards of each feature's table lie.
    """

    def __init__(self, features: tuple[int, ...], locations: Sequence[Sequence[Location]]) -> None:
        self.features = features
        groups = {(at.worker, at.number): at.group for shards in locations for at in shards}
        first: dict[tuple[int, int], int] = {}  # the first address of each group
        self._segments: list[tuple[int, int, int, torch.dtype]] = []  # worker, group, its first address
        end = 0
        for (worker, number), group in sorted(groups.items(), key=lambda item: item[0]):
            first[worker, number] = end
            self._segments.append((worker, number, end, ids_dtype(group.num_rows)))
            end += group.num_rows
        self._num_rows, self._dtype = end, ids_dtype(end)
        ends = torch.tensor([start for _, _, start, _ in self._segments[1:]] + [end], dtype=self._dtype)
        self._ends = ends.numpy()
        self._dim = locations[0][0].group.dim
        self._counts_K = np.array([len(shards) for shards in locations])
        self._bases_KS = np.zeros((len(features), self._counts_K.max()), np.int64)
        for k, shards in enumerate(locations):
            for at in shards:
                self._bases_KS[k, at.shard.index] = first[at.worker, at.number] + at.start

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
            slots.append((append(items, worker, (group, Bags(rows))), end - start))
        return _Rows(slots, starts_V, order_L, (*addresses_BK.shape, self._dim))


class _Rows(NamedTuple):
    """Assembles by spreading the distinct rows over the ids; the gradients of equal ids add up.

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
