"""Bags of ids, what both sides of a lookup know: from the rows they name to one vector a bag."""

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
        offsets: of the same type and of shape (bags + 1), where each bag starts; None where each id is
            its own bag.
        weights_L: weight of each id within its bag, or None for ones. Only for sum pooling.
        pooling: how the rows of a bag become one vector.
        winners_BD: for max pooling, the row that each pooled value came from, as ``pool_recorded`` found.
    """

    ids_L: Tensor
    offsets: Tensor | None = None
    weights_L: Tensor | None = None
    pooling: Pooling = Pooling.SUM
    winners_BD: Tensor | None = None

    @property
    def num_bags(self) -> int:
        """How many bags there are."""
        return len(self.ids_L) if self.offsets is None else len(self.offsets) - 1


# One lookup in one group of a worker's tables: the group's number, and the rows within it.
Item: TypeAlias = tuple[int, Bags]


# The same without its tensors: group, pooling, and whether there are offsets and weights.
PlainItem: TypeAlias = tuple[int, str, bool, bool]


def taken_apart(items: Sequence[Item]) -> tuple[list[PlainItem], list[Tensor]]:
    """Items that are asked for as plain values, and their tensors, for :func:`put_together`."""
    plain: list[PlainItem] = []
    tensors: list[Tensor] = []
    for group, (ids_L, offsets, weights_L, pooling, _) in items:
        plain.append((group, pooling.value, offsets is not None, weights_L is not None))
        tensors += [each for each in (ids_L, offsets, weights_L) if each is not None]
    return plain, tensors


def put_together(plain: Sequence[PlainItem], tensors: Iterable[Tensor]) -> list[Item]:
    """The items that :func:`taken_apart` has made this of; of an iterator, it takes their tensors."""
    rest = iter(tensors)
    items = []
    for group, pooling, has_offsets, has_weights in plain:
        ids_L = next(rest)
        offsets = next(rest) if has_offsets else None
        weights_L = next(rest) if has_weights else None
        items.append((group, Bags(ids_L, offsets, weights_L, Pooling(pooling))))
    return items


def ids_dtype(num_rows: int) -> torch.dtype:
    """The smallest type of ids below ``num_rows`` that torch looks up by."""
    return torch.int32 if num_rows <= torch.iinfo(torch.int32).max else torch.int64


def pool(weight_RD: Tensor, bags: Bags) -> Tensor:
    """One pooled vector a bag, (bags, D); zeros for an empty bag."""
    return pool_recorded(weight_RD, bags)[0]


def pool_recorded(weight_RD: Tensor, bags: Bags) -> tuple[Tensor, Bags]:
    """As :func:`pool`, and the bags with what their gradients will need, though the rows change meanwhile."""
    if bags.offsets is None:
        return weight_RD.index_select(0, bags.ids_L), bags
    pooled_BD, _, _, winners_BD = _embedding_bag(weight_RD, _with_weights_as(weight_RD.dtype, bags))
    if bags.pooling is Pooling.MAX:
        bags = bags._replace(winners_BD=winners_BD.to(bags.ids_L.dtype))
    return pooled_BD, bags


def _with_weights_as(dtype: torch.dtype, bags: Bags) -> Bags:
    return bags if bags.weights_L is None else bags._replace(weights_L=bags.weights_L.to(dtype))


def _embedding_bag(weight_RD: Tensor, bags: Bags) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.aten._embedding_bag(
        weight_RD, bags.ids_L, bags.offsets, False, _MODES[bags.pooling], False, bags.weights_L, True, -1
    )
    return result


def concatenate(parts: list[Bags]) -> Bags:
    """All bags of ``parts``, in order, as one; they share a pooling and a type of ids."""
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
