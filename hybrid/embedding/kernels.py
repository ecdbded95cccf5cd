"""The arithmetic of lookups: rows to pooled vectors, pooled gradients to row gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.embedding import loops
from hybrid.embedding.spec import Pooling

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


class RowGradients:
    """The gradients of the distinct rows that ``bags`` touch, summed in the order in which these stand.

    Sums are made when they are asked for, so that an update can go block by block through what fits the
    processor's cache.

    Args:
        grad_BD: gradient of each bag's pooled vector.
        num_rows: of the matrix.

    Attributes:
        rows_U: the rows, ascending.
    """

    def __init__(self, bags: Bags, grad_BD: Tensor, num_rows: int) -> None:
        rows_U, self._starts_V, order_L = loops.group_ids(bags.ids_L.numpy(), num_rows)
        self.rows_U = torch.from_numpy(rows_U)
        self._grad_BD = grad_BD.detach().contiguous()
        self._winners_BD = bags.winners_BD
        self._sources_L, self._weights_L = order_L, None
        if bags.offsets is not None:
            assert bags.pooling is not Pooling.MAX or bags.winners_BD is not None
            self._sources_L = loops.bags_in_order(bags.offsets.numpy(), order_L)
            self._weights_L = self._weights(bags, order_L)
        self._whole_UD: Tensor | None = None

    def _weights(self, bags: Bags, order_L: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """What the gradient of each id's bag is multiplied by, ids sorted."""
        if bags.weights_L is not None:
            weights_L = bags.weights_L.to(self._grad_BD.dtype).numpy()
            return weights_L[order_L]  # type: ignore[no-any-return]
        if bags.pooling is not Pooling.MEAN:
            return None
        assert bags.offsets is not None
        share_B = bags.offsets.diff().to(self._grad_BD.dtype).reciprocal_()
        return share_B.numpy()[self._sources_L]

    def block(self, first: int, last: int) -> tuple[Tensor, float]:
        """Gradients of the rows from ``first`` to ``last``, and their sum: finite if all of them are,
        unless it overflows."""
        if self._whole_UD is not None:
            block_UD = self._whole_UD[first:last]
            return block_UD, float(block_UD.sum())
        out_UD = self._grad_BD.new_empty(last - first, self._grad_BD.shape[1])
        starts_V, grad_BD = self._starts_V[first : last + 1], self._grad_BD.numpy()
        if self._weights_L is not None:
            total = loops.sum_weighted_rows(
                starts_V, self._sources_L, self._weights_L, grad_BD, out_UD.numpy()
            )
        elif self._winners_BD is not None:
            rows_U, winners_BD = self.rows_U[first:last].numpy(), self._winners_BD.numpy()
            total = loops.sum_largest_rows(
                starts_V, self._sources_L, rows_U, winners_BD, grad_BD, out_UD.numpy()
            )
        else:
            total = loops.sum_rows(starts_V, self._sources_L, grad_BD, out_UD.numpy())
        return out_UD, total

    def whole(self) -> Tensor:
        """Gradients of all rows, kept for the blocks that are asked for later."""
        if self._whole_UD is None:
            self._whole_UD = self.block(0, len(self.rows_U))[0]
        return self._whole_UD


def take(whole: Tensor, rows_U: Tensor) -> Tensor:
    """``whole[rows_U]``, of a contiguous matrix or vector."""
    part = whole.new_empty(len(rows_U), *whole.shape[1:])
    loops.take_rows(_matrix(whole), rows_U.numpy(), _matrix(part))
    return part


def put(whole: Tensor, rows_U: Tensor, part: Tensor) -> None:
    """``whole[rows_U] = part``, for a contiguous matrix or vector."""
    loops.put_rows(_matrix(whole), rows_U.numpy(), _matrix(part))


def add(whole_RD: Tensor, rows_U: Tensor, part_UD: Tensor, scale: float) -> None:
    """``whole_RD[rows_U] += scale * part_UD``."""
    matrix = whole_RD.numpy()
    loops.add_rows(matrix, rows_U.numpy(), part_UD.numpy(), matrix.dtype.type(scale))


def _matrix(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.view(len(tensor), -1).numpy() if len(tensor) else tensor.new_empty(0, 1).numpy()


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
