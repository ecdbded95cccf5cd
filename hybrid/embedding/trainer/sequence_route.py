"""Sequences: the vectors of a sample's ids stay apart, side by side, and beside them is their number.

A sequence of at most N ids has N places in a sample; those after its last id are zeros, for which no row is
read. Features of one id a sample and of the same width come along, with a place each, so that a row which a
history and its candidate share travels once::

    history of up to 3 ids, item    [ 4 7 . | 7 ]   [ . . . | 2 ]        rows that travel   2 4 7
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.embedding.placement import Location
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.route import Assembler, Items, Results, Slot
from hybrid.embedding.trainer.row_route import AddressSpace, Rows


class SequenceRoute:
    """Features of one width, sequences or of one id a sample: distinct rows travel once.

    Args:
        features: their numbers.
        locations: where the shards of each feature's table lie.
        places_F: how many vectors each has of a sample; of a sequence the most that it may.
    """

    def __init__(
        self, features: tuple[int, ...], locations: Sequence[Sequence[Location]], places_F: Sequence[int]
    ) -> None:
        self.features = features
        self._space = AddressSpace(locations)
        *self._first_F, self._num_places = accumulate(places_F, initial=0)

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
            self._space.ask(addresses_L, items),
            torch.cat([self._places(*each) for each in zip(bounds, self._first_F, strict=True)]),
            weights_L,
            (ids.batch_size, self._num_places, self._space.dim),
        )

    def _places(self, bounds: Tensor, first: int) -> Tensor:
        """Which of the places of all samples each id of a feature has, (L,)."""
        starts_B = bounds[:-1] - bounds[0]
        moved_B = torch.arange(len(starts_B)) * self._num_places + first - starts_B
        lengths_B = bounds.diff()
        return torch.arange(int(lengths_B.sum())) + moved_B.repeat_interleave(lengths_B)


class _Sequences(NamedTuple):
    """Assembles by giving each place the row of its id, if it has one.

    Attributes:
        places_L: of the ids.
        weights_L: of the ids, or None for ones.
    """

    rows: Rows
    places_L: Tensor
    weights_L: Tensor | None
    shape_BFD: tuple[int, int, int]

    def vectors(self, results: Results) -> Tensor:
        rows_UD, ranks_L = self.rows.answered(results)
        size, num_places, dim = self.shape_BFD
        row_of_place = torch.full((size * num_places,), len(rows_UD), dtype=torch.int32)
        row_of_place.index_copy_(0, self.places_L, ranks_L)
        rows_VD = torch.cat([rows_UD, rows_UD.new_zeros(1, dim)])  # the last is of places without an id
        vectors = rows_VD.index_select(0, row_of_place)
        if self.weights_L is not None:
            vectors[self.places_L] *= self.weights_L.unsqueeze(1).to(vectors)
        return vectors.view(self.shape_BFD)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        grads = grad_BFD.flatten(0, 1)
        if self.weights_L is not None:
            grad_LD = grads.index_select(0, self.places_L) * self.weights_L.unsqueeze(1).to(grads)
            return self.rows.gradients(grad_LD)
        # What is added up lies at the places; there is no need to bring it into the order of the ids before.
        sources_L = self.places_L.to(torch.int32).index_select(0, torch.from_numpy(self.rows.order_L))
        return self.rows._replace(order_L=sources_L.numpy()).gradients(grads)


class LengthRoute:
    """How many ids each sample has of some sequences, for which nobody is asked."""

    def __init__(self, features: tuple[int, ...]) -> None:
        self.features = features

    def start(self, ids: BatchIds, items: Items) -> Assembler:
        lengths_BF = torch.stack([ids.bounds(k).diff() for k in self.features], dim=1)
        return _Lengths(lengths_BF.unsqueeze(2))


class _Lengths(NamedTuple):
    """Vectors of one number, which is known here."""

    lengths_BF1: Tensor

    @property
    def shape_BFD(self) -> tuple[int, int, int]:
        size, num_features, one = self.lengths_BF1.shape
        return size, num_features, one

    def vectors(self, results: Results) -> Tensor:
        answered = (tensor for tensors in results.values() for tensor in tensors)
        return self.lengths_BF1.to(next(answered).dtype)

    def gradients(self, grad_BFD: Tensor) -> list[tuple[Slot, Tensor]]:
        return []
