"""Bags of ids: requests of a lookup, and how the rows of a bag become one vector."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybrid.embedding.table_spec import Pooling

_MODES = {Pooling.SUM: 0, Pooling.MEAN: 1, Pooling.MAX: 2}


class Bags(NamedTuple):
    """Ids to look up in one weight matrix.

    Attributes:
        ids_L: rows of the matrix, int32 or int64.
        offsets: where each bag starts, of the same type and of shape (bags + 1); None for one id per bag.
        weights_L: weight of each id within its bag, or None for ones; for sum pooling only.
        pooling: how the rows of a bag become one vector.
        winners_BD: for max pooling, the row of each pooled value; set by :func:`pool_and_record`.
    """

    ids_L: Tensor
    offsets: Tensor | None = None
    weights_L: Tensor | None = None
    pooling: Pooling = Pooling.SUM
    winners_BD: Tensor | None = None

    @property
    def num_bags(self) -> int:
        """Number of bags."""
        return len(self.ids_L) if self.offsets is None else len(self.offsets) - 1


# A request to one group of a worker's tables: index of the group, and the rows within it.
Item: TypeAlias = tuple[int, Bags]


# An item without its tensors: group, pooling, and whether there are offsets and weights.
PackedItem: TypeAlias = tuple[int, str, bool, bool]


def pack_items(items: Sequence[Item]) -> tuple[list[PackedItem], list[Tensor]]:
    """Split items into plain values and tensors, for :func:`unpack_items`."""
    packed: list[PackedItem] = []
    tensors: list[Tensor] = []
    for group, (ids_L, offsets, weights_L, pooling, _) in items:
        packed.append((group, pooling.value, offsets is not None, weights_L is not None))
        tensors += [each for each in (ids_L, offsets, weights_L) if each is not None]
    return packed, tensors


def unpack_items(packed: Sequence[PackedItem], tensors: Iterable[Tensor]) -> list[Item]:
    """Undo :func:`pack_items`; from an iterator of tensors, take those of these items."""
    rest = iter(tensors)
    items = []
    for group, pooling, has_offsets, has_weights in packed:
        ids_L = next(rest)
        offsets = next(rest) if has_offsets else None
        weights_L = next(rest) if has_weights else None
        items.append((group, Bags(ids_L, offsets, weights_L, Pooling(pooling))))
    return items


def ids_dtype(num_rows: int) -> torch.dtype:
    """Return the smallest integer type of torch's lookups that holds ids below ``num_rows``."""
    return torch.int32 if num_rows <= torch.iinfo(torch.int32).max else torch.int64


def pool(weight_RD: Tensor, bags: Bags) -> Tensor:
    """Return one pooled vector per bag, (bags, D); zeros for an empty bag."""
    return pool_and_record(weight_RD, bags)[0]


def pool_and_record(weight_RD: Tensor, bags: Bags) -> tuple[Tensor, Bags]:
    """Pool, and return the bags with what their gradients need, in case the rows change before."""
    if bags.offsets is None:
        return weight_RD.index_select(0, bags.ids_L), bags
    weights_L = None if bags.weights_L is None else bags.weights_L.to(weight_RD.dtype)
    pooled_BD, _, _, winners_BD = torch.ops.aten._embedding_bag(
        weight_RD, bags.ids_L, bags.offsets, False, _MODES[bags.pooling], False, weights_L, True, -1
    )
    if bags.pooling is Pooling.MAX:
        bags = bags._replace(winners_BD=winners_BD.to(bags.ids_L.dtype))
    return pooled_BD, bags


def concatenate(parts: list[Bags]) -> Bags:
    """Concatenate bags of one pooling and one type of ids."""
    if len(parts) == 1:
        return parts[0]
    ids_L = torch.cat([p.ids_L for p in parts])
    if all(p.offsets is None for p in parts):
        return Bags(ids_L, None, None, parts[0].pooling)
    starts, base = [], 0
    for part in parts:
        offsets = torch.arange(len(part.ids_L) + 1) if part.offsets is None else part.offsets
        starts.append(offsets[:-1].to(ids_L.dtype) + base)
        base += len(part.ids_L)
    starts.append(ids_L.new_tensor([base]))
    weights_L = None
    if any(p.weights_L is not None for p in parts):
        weights_L = torch.cat(
            [torch.ones(len(p.ids_L)) if p.weights_L is None else p.weights_L for p in parts]
        )
    winners = [p.winners_BD for p in parts if p.winners_BD is not None]
    return Bags(
        ids_L, torch.cat(starts), weights_L, parts[0].pooling, torch.cat(winners) if winners else None
    )
