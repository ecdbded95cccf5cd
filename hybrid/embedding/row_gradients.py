"""Gradients of the rows of a lookup, from the gradients of its pooled vectors."""

from __future__ import annotations

from copy import copy

import numpy as np
import torch
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags
from hybrid.embedding.kernels import Floats, Ints
from hybrid.embedding.table_spec import Pooling


class GroupedBags:
    """Bags whose ids are grouped by distinct row, so that :class:`RowGradients` can sum their gradients.

    Args:
        grouped: the result of :func:`kernels.group_ids` for the ids of ``bags``.
        dtype: type of the gradients.

    Attributes:
        rows_U: the distinct rows, ascending.
        starts_V: where the ids of each distinct row start, in the order of the sorted ids.
        sources_L, weights_L: bag of each id, and factor of its gradient (None for ones), in the sorted order.
        winners_BD: for max pooling, the row of each maximum; else None.
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

        The sum detects NaN and infinity: it is finite if all values are finite, unless it overflows. After
        :meth:`sum_all`, this call scales the stored gradients in place, so scale each row only once.
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

        Return the sum of all values of the unscaled gradients, as :meth:`sum_block` does.
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
        """Return a copy with the new row numbers ``rows_U``. Rows with a negative new number are left out."""
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
        """Return the gradients of all rows, (U, D). Later, :meth:`sum_block` returns slices of them."""
        if self._all_UD is None:
            self._all_UD = self.sum_block(0, len(self.rows_U))[0]
        return self._all_UD
