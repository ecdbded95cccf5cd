"""Bags of ids, each pooled into one vector: the requests of a lookup, pooling, and gradients of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.kernels import Floats, Ints
from hybrid.embedding.table_spec import Pooling

_MODES = {Pooling.SUM: 0, Pooling.MEAN: 1, Pooling.MAX: 2}


class Bags(NamedTuple):
    """Bags of ids to look up in one weight matrix."""

    ids_L: Tensor  # rows of the matrix, int32 or int64; for a growing table, keys
    # Where each bag starts, of shape (bags + 1) and the type of the ids; None for one id per bag.
    offsets: Tensor | None = None
    # Weight of each id within its bag, or None for ones; for sum pooling only.
    weights_L: Tensor | None = None
    pooling: Pooling = Pooling.SUM  # how the rows of a bag become one vector
    winners_BD: Tensor | None = None  # for max pooling, the row of each maximum; set by pool_and_record

    @property
    def num_bags(self) -> int:
        return len(self.ids_L) if self.offsets is None else len(self.offsets) - 1


# A request to one group of a worker's tables: index of the group, and rows within the group.
Item: TypeAlias = tuple[int, Bags]

# The last request of a custom module's training lookup, whose loss may not use all vectors. The gradient
# of its response has a mark for each bag of the other requests, then for each table: 0 if the loss does not
# use the bag or table, which is then not updated, else 1. Example: requests of 3 and 2 bags, 2 tables; the
# loss does not use the second request and the last table: 1 1 1, 0 0, 1 0. No marks mean all ones.
MARKS: Item = (-1, Bags(torch.empty(0, dtype=torch.int32)))


def has_marks(items: Sequence[Item]) -> bool:
    """Return whether the last item is :data:`MARKS`, so that the gradients end with marks of unused bags."""
    return bool(items) and items[-1][0] == MARKS[0]


# An item without tensors: group, pooling, whether it has offsets, and whether it has weights.
PackedItem: TypeAlias = tuple[int, str, bool, bool]


def pack_items(items: Sequence[Item]) -> tuple[list[PackedItem], list[Tensor]]:
    """Split the requests of a lookup into plain values and tensors for a message."""
    packed: list[PackedItem] = []
    tensors: list[Tensor] = []
    for group, (ids_L, offsets, weights_L, pooling, _) in items:
        packed.append((group, pooling.value, offsets is not None, weights_L is not None))
        tensors += [each for each in (ids_L, offsets, weights_L) if each is not None]
    return packed, tensors


def unpack_items(packed: Sequence[PackedItem], tensors: Iterable[Tensor]) -> list[Item]:
    """Return the requests that :func:`pack_items` has split."""
    rest = iter(tensors)
    items = []
    for group, pooling, has_offsets, has_weights in packed:
        ids_L = next(rest)
        offsets = next(rest) if has_offsets else None
        weights_L = next(rest) if has_weights else None
        items.append((group, Bags(ids_L, offsets, weights_L, Pooling(pooling))))
    return items


def ids_dtype(num_rows: int) -> torch.dtype:
    """Return the dtype for ids of a table: int32 if it can represent ``num_rows``, else int64."""
    return torch.int32 if num_rows <= torch.iinfo(torch.int32).max else torch.int64


def pool_and_record(weight_RD: Tensor, bags: Bags) -> tuple[Tensor, Bags]:
    """Return one vector per bag, (bags, D), and the bags. An empty bag gives zeros.

    For max pooling, the returned bags record the row of each maximum, which the backward pass needs.
    """
    if bags.offsets is None:
        return weight_RD.index_select(0, bags.ids_L), bags
    weights_L = None if bags.weights_L is None else bags.weights_L.to(weight_RD.dtype)
    pooled_BD, _, _, winners_BD = torch.ops.aten._embedding_bag(
        weight_RD, bags.ids_L, bags.offsets, False, _MODES[bags.pooling], False, weights_L, True, -1
    )
    if bags.pooling is Pooling.MAX:
        bags = bags._replace(winners_BD=winners_BD.to(bags.ids_L.dtype))
    return pooled_BD, bags


def pool_vectors(vectors_LD: Tensor, bags: Bags) -> tuple[Tensor, Bags]:
    """Like :func:`pool_and_record`, but ``vectors_LD`` has the vector of each id of ``bags``."""
    order_L = torch.arange(len(vectors_LD), dtype=bags.ids_L.dtype)
    pooled_BD, of_order = pool_and_record(vectors_LD, bags._replace(ids_L=order_L))
    if of_order.winners_BD is None:
        return pooled_BD, bags
    rows_V = torch.cat([bags.ids_L, bags.ids_L.new_zeros(1)])  # an empty bag has the winner -1
    return pooled_BD, bags._replace(winners_BD=rows_V[of_order.winners_BD.long()])


def concatenate(parts: list[Bags]) -> Bags:
    """Concatenate bags with equal pooling and id type. Either all of them have offsets, or none has."""
    if len(parts) == 1:
        return parts[0]
    ids_L = torch.cat([p.ids_L for p in parts])
    lengths = [part.offsets.diff() for part in parts if part.offsets is not None]
    if not lengths:
        return Bags(ids_L, pooling=parts[0].pooling)
    offsets = torch.cat([ids_L.new_zeros(1), *lengths]).cumsum(0, dtype=ids_L.dtype)
    weights_L = None
    if any(p.weights_L is not None for p in parts):
        weights_L = torch.cat(
            [torch.ones(len(p.ids_L)) if p.weights_L is None else p.weights_L for p in parts]
        )
    winners = [p.winners_BD for p in parts if p.winners_BD is not None]
    return Bags(ids_L, offsets, weights_L, parts[0].pooling, torch.cat(winners) if winners else None)


class GroupedBags:
    """Bags grouped by distinct row: the input of :class:`RowGradients` besides the gradients.

    Args:
        grouped: the result of :func:`kernels.group_ids` for the ids of ``bags``.
        dtype: type of the gradients.

    Attributes:
        rows_U: the distinct rows, ascending.
        starts_V: where the ids of each distinct row start, in the order of the sorted ids.
        sources_L: bag of each id, in the order of the sorted ids.
        weights_L: factor of each id's gradient, in the order of the sorted ids; None for ones.
        winners_BD: see :class:`Bags`.
    """

    def __init__(self, bags: Bags, grouped: tuple[Ints, Ints, Ints], dtype: torch.dtype) -> None:
        rows_U, self.starts_V, self.sources_L = grouped
        self.rows_U = torch.from_numpy(rows_U)
        self.winners_BD = bags.winners_BD
        self.weights_L: Floats | None = None
        if bags.offsets is not None:
            assert bags.pooling is not Pooling.MAX or bags.winners_BD is not None
            order_L = self.sources_L
            self.sources_L = kernels.sort_bags(bags.offsets.numpy(), order_L)
            if bags.weights_L is not None:
                self.weights_L = bags.weights_L.to(dtype).numpy()[order_L]
            elif bags.pooling is Pooling.MEAN:
                factor_B = bags.offsets.diff().to(dtype).reciprocal_()
                self.weights_L = factor_B.numpy()[self.sources_L]


class RowGradients:
    """Gradients of the distinct rows of bags, summed in the order of the bags.

    Each call of :meth:`sum_block` sums one block of rows, so that the blocks of an update fit the CPU cache.

    Args:
        grad_BD: gradient of each bag's pooled vector.
    """

    def __init__(self, bags: GroupedBags, grad_BD: Tensor) -> None:
        self.rows_U = bags.rows_U
        self._bags = bags
        self._grad_BD = grad_BD.detach().contiguous()
        self._all_UD: Tensor | None = None

    def sum_block(self, first: int, last: int, scale: float = 1.0) -> tuple[Tensor, float]:
        """Return the scaled gradients of the rows ``rows_U[first:last]``, and the sum of the unscaled values.

        The sum is a test for values that are not finite. It is finite if all values are, unless it overflows.
        After :meth:`sum_all`, ``scale`` changes the stored sums, so scale each block only once.
        """
        if self._all_UD is None:
            block_UD = self._grad_BD.new_empty(last - first, self._grad_BD.shape[1])
            total = self._sum(first, last, block_UD, None)
        else:
            block_UD = self._all_UD[first:last]
            total = float(block_UD.sum())
        return block_UD if scale == 1.0 else block_UD.mul_(scale), total

    def add_to(self, table_RD: Tensor, first: int, last: int, scale: float, rate: float) -> float:
        """Add ``rate * (scale * gradient)`` to the rows ``rows_U[first:last]`` of a table, in one pass.

        Return the sum of all values of the unscaled gradients.
        """
        return self._sum(first, last, self._grad_BD[:0], table_RD.numpy(), scale, rate)

    def _sum(
        self, first: int, last: int, out_UD: Tensor, table: Floats | None, scale: float = 1, rate: float = 1
    ) -> float:
        bags = self._bags
        grad = self._grad_BD.numpy()
        winners_BD = None if bags.winners_BD is None else bags.winners_BD.numpy()
        has_rows = table is not None or winners_BD is not None
        return kernels.sum_rows(
            starts_V=bags.starts_V[first : last + 1],
            sources_L=bags.sources_L,
            grad_BD=grad,
            out_UD=out_UD.numpy(),
            weights_L=bags.weights_L,
            rows_U=self.rows_U[first:last].numpy() if has_rows else None,
            winners_BD=winners_BD,
            table_RD=table,
            scale=grad.dtype.type(scale),
            rate=grad.dtype.type(rate),
        )

    def select(self, rows_U: Tensor) -> RowGradients:
        """Return a copy with ``rows_U`` as the new numbers of the rows; a negative number drops a row."""
        selected = copy(self)
        is_kept_U = rows_U >= 0
        selected.rows_U = rows_U[is_kept_U]
        if len(selected.rows_U) == len(rows_U):
            return selected
        if self._all_UD is not None:
            selected._all_UD = self._all_UD[is_kept_U]
        is_kept = is_kept_U.numpy()
        lengths_U = np.diff(self._bags.starts_V)
        assert self._bags.weights_L is None, "trainers pool the bags of growing tables"
        selected._bags = copy(self._bags)
        selected._bags.sources_L = self._bags.sources_L[np.repeat(is_kept, lengths_U)]
        selected._bags.starts_V = np.concatenate([[0], lengths_U[is_kept].cumsum()]).astype(np.int32)
        return selected

    def sum_all(self) -> Tensor:
        """Return the gradients of all rows, (U, D). Later calls of :meth:`sum_block` return views of them."""
        if self._all_UD is None:
            self._all_UD = self.sum_block(0, len(self.rows_U))[0]
        return self._all_UD
