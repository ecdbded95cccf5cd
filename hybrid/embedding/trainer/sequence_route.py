"""Sequences: one vector per position, and the number of ids.

A sequence of at most N ids has N positions in a sample; those after its last id are zeros, and read no row.
Features of the same width with one id per sample share the route, with one position each, so that a row which
a history and its candidate share travels once::

    history of up to 3 ids, item    [ 4 7 . | 7 ]   [ . . . | 2 ]        rows that travel   2 4 7
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.embedding.placement import Location
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.route import Assembler, Items, Responses, Slot
from hybrid.embedding.trainer.row_route import AddressSpace, DistinctRows


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
        for number, (part, out_L) in enumerate(zip(parts, out, strict=True)):
            self._space.write(ids.ids_L[part].view(1, -1), number, out_L.view(-1, 1))
        weights_L = None
        if ids.weights_L is not None and not ids.weighted.isdisjoint(self.features):
            weights_L = torch.cat([ids.weights_L[part] for part in parts])
        return _Sequences(
            self._space.request(addresses_L, items),
            torch.cat([self._positions(*each) for each in zip(bounds, self._first_F, strict=True)]),
            weights_L,
            (ids.batch_size, self._num_positions, self._space.dim),
        )

    def _positions(self, bounds: Tensor, first: int) -> Tensor:
        """Return the position of each id of a feature among those of all samples, (L,)."""
        starts_B = bounds[:-1] - bounds[0]
        shifts_B = torch.arange(len(starts_B)) * self._num_positions + first - starts_B
        lengths_B = bounds.diff()
        return torch.arange(int(lengths_B.sum())) + shifts_B.repeat_interleave(lengths_B)


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
        rows_VD = torch.cat(
            [rows_UD, rows_UD.new_zeros(1, dim)]
        )  # the last row is for positions without an id
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
