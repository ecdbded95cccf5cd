"""DeepFM: a factorisation machine and a deep net over the same vectors.

Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (arXiv 1703.04247),
equations 1 to 4. Feature k has factors v_k and a weight w_k of first order::

    logit = sum of w_k + a . dense + sum over k < l of v_k . v_l + deep([dense, v_1, ..., v_K])
"""

from collections.abc import Sequence

from torch import nn

from hybrid.dense.nets import DenseNet, FactorizationMachine, WideHead, output_mlp


class DeepFM(DenseNet):
    """Called with ``dense_BF`` and ``pooled_BE``, gives ``logits_B``.

    Args:
        num_dense: F.
        num_sparse: K, vectors side by side in ``pooled_BE``.
        dim: of the factors of each; its weight comes after them, so tables are of width ``dim + 1``.
        deep: widths of the layers of the deep net.
    """

    def __init__(self, num_dense: int, num_sparse: int, dim: int, deep: Sequence[int] = (64, 32)) -> None:
        interaction = FactorizationMachine(num_sparse, dim + 1, num_dense)
        head = WideHead(output_mlp((num_dense + num_sparse * dim, *deep)))
        super().__init__(nn.Identity(), interaction, head)
