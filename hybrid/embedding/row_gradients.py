"""Gradients of rows, from gradients of pooled vectors."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags
from hybrid.embedding.kernels import Ints
from hybrid.embedding.table_spec import Pooling


class RowGradients:
    """Gradients of the distinct rows of ``bags``, summed in the order of the bags.

    Sums are computed block by block on request, so that the blocks of an update fit the processor's cache.

    Args:
        grad_BD: gradient of each bag's pooled vector.
        grouped: the ids of ``bags``, as :func:`kernels.group_ids` returns them.

    Attributes:
        rows_U: the rows, ascending.
    """

    def __init__(self, bags: Bags, grad_BD: Tensor, grouped: tuple[Ints, Ints, Ints]) -> None:
        rows_U, self._starts_V, order_L = grouped
        self.rows_U = torch.from_numpy(rows_U)
        self._grad_BD = grad_BD.detach().contiguous()
        self._winners_BD = bags.winners_BD
        self._sources_L = order_L
        # Factor of each id's gradient, in the order of the sorted ids; None for ones.
        self._weights_L: npt.NDArray[Any] | None = None
        if bags.offsets is not None:
            assert bags.pooling is not Pooling.MAX or bags.winners_BD is not None
            self._sources_L = kernels.bags_in_order(bags.offsets.numpy(), order_L)
            if bags.weights_L is not None:
                self._weights_L = bags.weights_L.to(grad_BD.dtype).numpy()[order_L]
            elif bags.pooling is Pooling.MEAN:
                factor_B = bags.offsets.diff().to(grad_BD.dtype).reciprocal_()
                self._weights_L = factor_B.numpy()[self._sources_L]
        self._whole_UD: Tensor | None = None

    def block(self, first: int, last: int) -> tuple[Tensor, float]:
        """Return the gradients of the rows from ``first`` to ``last``, and their sum.

        The sum is finite if all gradients are, unless it overflows.
        """
        if self._whole_UD is not None:
            block_UD = self._whole_UD[first:last]
            return block_UD, float(block_UD.sum())
        out_UD = self._grad_BD.new_empty(last - first, self._grad_BD.shape[1])
        starts_V, grad_BD = self._starts_V[first : last + 1], self._grad_BD.numpy()
        if self._weights_L is not None:
            total = kernels.sum_weighted_rows(
                starts_V, self._sources_L, self._weights_L, grad_BD, out_UD.numpy()
            )
        elif self._winners_BD is not None:
            rows_U, winners_BD = self.rows_U[first:last].numpy(), self._winners_BD.numpy()
            total = kernels.sum_largest_rows(
                starts_V, self._sources_L, rows_U, winners_BD, grad_BD, out_UD.numpy()
            )
        else:
            total = kernels.sum_rows(starts_V, self._sources_L, grad_BD, out_UD.numpy())
        return out_UD, total

    def whole(self) -> Tensor:
        """Return the gradients of all rows; later blocks are views of them."""
        if self._whole_UD is None:
            self._whole_UD = self.block(0, len(self.rows_U))[0]
        return self._whole_UD
