"""DeepFM: a factorization machine and a deep net over the same vectors.

Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (arXiv 1703.04247),
equations 1 to 4. Feature k has factors v_k and a first-order weight w_k::

    logit = sum of w_k + a . dense + sum over k < l of v_k . v_l + deep([dense, v_1, ..., v_K])

With several outputs per sample, the score of the machine is added to each output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.dense_net import DenseNet
from hybrid.models.layers import output_mlp
from hybrid.models.wide_deep import LinearTerm, WideHead


class FactorizationMachine(nn.Module):
    """The interaction of DeepFM: the machine's score in column 0, followed by the inputs of the deep net.

    The vector of a feature has D factors, then the first-order weight, so ``width`` is D + 1.
    """

    def __init__(self, num_sparse: int, width: int, num_dense: int) -> None:
        super().__init__()
        self.vectors_shape = (num_sparse, width)
        self.linear = LinearTerm(num_dense)

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        vectors_BKW = pooled_BE.view(pooled_BE.size(0), *self.vectors_shape)
        factors_BKD, weights_BK = vectors_BKW[..., :-1], vectors_BKW[..., -1]
        # The sum of the dot products of all pairs is half of (square of the sum - sum of the squares).
        pairs_BD = factors_BKD.sum(dim=1).square() - factors_BKD.square().sum(dim=1)
        score_B1 = self.linear(dense_BF, weights_BK) + 0.5 * pairs_BD.sum(dim=1, keepdim=True)
        return torch.cat([score_B1, dense_BF, factors_BKD.flatten(1)], dim=1)


class DeepFM(DenseNet):
    """The model; see :class:`DenseNet` for inputs and outputs.

    Args:
        num_dense: F, the number of dense features; may be 0.
        num_sparse: K, the number of vectors in ``pooled_BE``.
        dim: D, the number of factors of a feature. A weight follows them, so tables have width ``dim + 1``.
        deep: hidden units of the deep net.
    """

    def __init__(
        self, num_dense: int, num_sparse: int, dim: int, deep: Sequence[int] = (64, 32), num_outputs: int = 1
    ) -> None:
        machine = FactorizationMachine(num_sparse, dim + 1, num_dense)
        head = output_mlp((num_dense + num_sparse * dim, *deep), num_outputs)
        super().__init__(nn.Identity(), machine, WideHead(head))
