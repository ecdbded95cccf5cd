"""DLRM: dot products of all pairs of vectors.

Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (arXiv
1906.00091). A bottom net maps the dense features to a vector as wide as the K embeddings::

    logit = top( [z_0, z_i . z_j for i > j] )          z_0 = bottom(dense), z_1 ... z_K the embeddings

Without dense features there is no z_0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid.models.dense_net import DenseNet
from hybrid.models.layers import mlp, output_mlp


class _PairwiseDots(torch.autograd.Function):
    """Dot products of selected pairs. The backward pass takes one matrix product; autograd would take two."""

    @staticmethod
    def forward(ctx: Any, vectors_BND: Tensor, pairs_P: Tensor, pair_of_NN: Tensor) -> Tensor:
        ctx.save_for_backward(vectors_BND, pair_of_NN)
        return torch.bmm(vectors_BND, vectors_BND.mT).flatten(1).index_select(1, pairs_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        vectors_BND, pair_of_NN = ctx.saved_tensors
        grad_BP = grads[0].to(vectors_BND.dtype)  # differs under autocast
        grad_BNN = grad_BP.index_select(1, pair_of_NN.flatten()).view(grad_BP.size(0), *pair_of_NN.shape)
        grad_BNN.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(grad_BNN, vectors_BND), None, None


class DotInteraction(nn.Module):
    """Concatenation of the bottom vector and the dot products of all pairs of vectors.

    The vectors are the output of the bottom net, if there are dense features, and the embeddings.
    Pairs are in the order of the rows of a lower triangle: (1,0), (2,0), (2,1), ...
    """

    pairs_P: Tensor  # index of each pair in the flattened Gram matrix
    pair_of_NN: Tensor  # pair at each index of the Gram matrix, except on its diagonal

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        self.vectors_shape = (num_vectors, dim)
        rows_P, columns_P = np.tril_indices(num_vectors, -1)
        pair_of_NN = np.zeros((num_vectors, num_vectors), np.int64)
        pair_of_NN[rows_P, columns_P] = pair_of_NN[columns_P, rows_P] = np.arange(len(rows_P))
        self.register_buffer("pairs_P", torch.tensor(rows_P * num_vectors + columns_P), persistent=False)
        self.register_buffer("pair_of_NN", torch.tensor(pair_of_NN), persistent=False)

    def forward(self, bottom_BD: Tensor, pooled_BE: Tensor) -> Tensor:
        vectors_BND = torch.cat([bottom_BD, pooled_BE], dim=1).view(pooled_BE.size(0), *self.vectors_shape)
        dots_BP = _PairwiseDots.apply(vectors_BND, self.pairs_P, self.pair_of_NN)  # type: ignore[no-untyped-call]
        return torch.cat([bottom_BD, dots_BP], dim=1)


class DLRM(DenseNet):
    """The model; see :class:`DenseNet` for inputs and outputs.

    Args:
        num_dense: F, the number of dense features; may be 0.
        num_sparse: K, the number of vectors in ``pooled_BE``.
        dim: D, the width of each vector.
        bottom, top: hidden units of both nets; there is no bottom net if ``num_dense`` is 0.
    """

    def __init__(
        self,
        num_dense: int,
        num_sparse: int,
        dim: int,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
        num_outputs: int = 1,
    ) -> None:
        num_vectors = num_sparse + bool(num_dense)
        hidden = dim * bool(num_dense) + num_vectors * (num_vectors - 1) // 2
        super().__init__(
            mlp((num_dense, *bottom, dim)) if num_dense else nn.Identity(),
            DotInteraction(num_vectors, dim),
            output_mlp((hidden, *top), num_outputs),
        )
