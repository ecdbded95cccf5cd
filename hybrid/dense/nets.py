"""The dense nets: DLRM, DCN-v2, DeepFM, Wide&Deep, or the user's own, each in three stages.

::

    dense_BF ── bottom ── bottom_BH ─┐
                                     interaction ── hidden_BH ── head ── outputs_BO
    pooled_BE (embeddings) ──────────┘

The stages are apart since embeddings are asked for before ``bottom`` and awaited after it, and a
remote dense net may sit between ``interaction`` and ``head``. Every stage takes an empty batch. A sample has
one output for each task, or for each of its classes; where that is one in all, they are ``outputs_B``.
"""

# No postponed annotations here: TorchScript checks those of buffers, as types.

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """A linear layer and ReLU from each width to the next."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def output_mlp(widths: Sequence[int], num_outputs: int = 1) -> nn.Sequential:
    """An MLP over ``widths``, then a plain layer to the outputs of a sample; to ``outputs_B`` of one."""
    layers = mlp(widths).append(nn.Linear(widths[-1], num_outputs))
    return layers.append(nn.Flatten(0)) if num_outputs == 1 else layers


class DenseNet(nn.Module):
    """``head(interaction(bottom(dense_BF), pooled_BE))`` gives ``outputs_BO``.

    ``pooled_BE`` holds the pooled embeddings of all sparse features, side by side in their order.
    """

    def __init__(self, bottom: nn.Module, interaction: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.bottom = bottom
        self.interaction = interaction
        self.head = head

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        outputs_BO: Tensor = self.head(self.interaction(self.bottom(dense_BF), pooled_BE))
        return outputs_BO


class _PairwiseDots(torch.autograd.Function):
    """Dot products of chosen pairs of vectors.

    The gradient of a Gram matrix is symmetric, so one product gives what autograd takes two products
    and a scatter for: 1.5 ms instead of 2.4 ms forward and backward for 1024 x 27 vectors of 16.
    """

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
    """DLRM's interaction: the bottom vector, then the dot product of every pair of vectors.

    The vectors are the bottom's (where there are dense features) and each feature's embedding; pairs
    come as in the rows of a lower triangle, (1,0), (2,0), (2,1), ... (Naumov et al. 2019).
    """

    pairs_P: Tensor  # where each pair lies in a flattened Gram matrix
    pair_of_NN: Tensor  # which pair lies at each place of it, its diagonal aside

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        self.vectors_shape = (num_vectors, dim)
        rows_P, columns_P = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        pair_of_NN = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        pair_of_NN[rows_P, columns_P] = pair_of_NN[columns_P, rows_P] = torch.arange(rows_P.numel())
        self.register_buffer("pairs_P", rows_P * num_vectors + columns_P, persistent=False)
        self.register_buffer("pair_of_NN", pair_of_NN, persistent=False)

    def forward(self, bottom_BD: Tensor, pooled_BE: Tensor) -> Tensor:
        vectors_BND = torch.cat([bottom_BD, pooled_BE], dim=1).view(pooled_BE.size(0), *self.vectors_shape)
        # TorchScript that calls a function of Python's can be neither saved nor sent.
        if torch.jit.is_scripting() or torch.jit.is_tracing():
            dots_BP = torch.bmm(vectors_BND, vectors_BND.mT).flatten(1).index_select(1, self.pairs_P)
        else:
            dots_BP = _PairwiseDots.apply(vectors_BND, self.pairs_P, self.pair_of_NN)  # type: ignore[no-untyped-call]
        return torch.cat([bottom_BD, dots_BP], dim=1)


class CrossInteraction(nn.Module):
    """DCN-v2's cross layers over all inputs: ``x = x0 * (W x + b) + x`` (Wang et al. 2021)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        x0_BH = x_BH = torch.cat([dense_BF, pooled_BE], dim=1)
        for layer in self.layers:
            x_BH = torch.addcmul(x_BH, x0_BH, layer(x_BH))
        return x_BH


class LinearTerm(nn.Module):
    """First-order term of a sample: its features' own weights plus a linear map of its dense features."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        # torch warns when it initialises an empty weight.
        self.dense_weights = nn.Linear(num_dense, 1, bias=False) if num_dense else None

    def forward(self, dense_BF: Tensor, weights_BK: Tensor) -> Tensor:
        term_B1 = weights_BK.sum(dim=1, keepdim=True)
        return term_B1 if self.dense_weights is None else term_B1 + self.dense_weights(dense_BF)


class FactorizationMachine(nn.Module):
    """DeepFM's interaction: its score in column 0, then the inputs of the deep net (Guo et al. 2017).

    A feature's vector is its D factors followed by its first-order weight.
    """

    def __init__(self, num_sparse: int, width: int, num_dense: int) -> None:
        super().__init__()
        self.vectors_shape = (num_sparse, width)
        self.linear = LinearTerm(num_dense)

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        vectors_BKW = pooled_BE.view(pooled_BE.size(0), *self.vectors_shape)
        factors_BKD, weights_BK = vectors_BKW[..., :-1], vectors_BKW[..., -1]
        # The sum over pairs of dot products is half of the square of the sum less the sum of squares.
        pairs_BD = factors_BKD.sum(dim=1).square() - factors_BKD.square().sum(dim=1)
        score_B1 = self.linear(dense_BF, weights_BK) + 0.5 * pairs_BD.sum(dim=1, keepdim=True)
        return torch.cat([score_B1, dense_BF, factors_BKD.flatten(1)], dim=1)


class WideAndDeepInputs(nn.Module):
    """Wide&Deep's interaction: the wide score in column 0, then the deep inputs (Cheng et al. 2016).

    A feature's vector is its embedding, of any width, followed by its weight in the wide part.
    """

    wide_K: Tensor
    deep_E: Tensor

    def __init__(self, widths: Sequence[int], num_dense: int) -> None:
        super().__init__()
        ends_K = torch.tensor(widths).cumsum(0)
        is_wide_E = torch.zeros(sum(widths), dtype=torch.bool)
        is_wide_E[ends_K - 1] = True
        self.register_buffer("wide_K", is_wide_E.nonzero().flatten(), persistent=False)
        self.register_buffer("deep_E", is_wide_E.logical_not().nonzero().flatten(), persistent=False)
        self.linear = LinearTerm(num_dense)

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        score_B1 = self.linear(dense_BF, pooled_BE.index_select(1, self.wide_K))
        return torch.cat([score_B1, dense_BF, pooled_BE.index_select(1, self.deep_E)], dim=1)


class WideHead(nn.Module):
    """Outputs of a net with a wide part: column 0, plus what ``deep`` makes of the others, in each."""

    def __init__(self, deep: nn.Module) -> None:
        super().__init__()
        self.deep = deep

    def forward(self, hidden_BH: Tensor) -> Tensor:
        deep_BO: Tensor = self.deep(hidden_BH[:, 1:])
        wide_B = hidden_BH[:, 0]
        return (wide_B if deep_BO.dim() == 1 else wide_B.unsqueeze(1)) + deep_BO
