"""DLRM: every pair of vectors meets in a dot product.

Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (arXiv
1906.00091). A bottom net makes a vector of the numeric features, as wide as those of the K categorical ones::

    logit = top( [z_0, z_i . z_j for i > j] )          z_0 = bottom(dense), z_1 ... z_K the embeddings
"""

from collections.abc import Sequence

from hybrid.dense.nets import DenseNet, DotInteraction, mlp, output_mlp


class DLRM(DenseNet):
    """Called with ``dense_BF`` and ``pooled_BE``, gives ``logits_B``.

    Args:
        num_dense: F.
        num_sparse: K, vectors side by side in ``pooled_BE``.
        dim: D, of each.
        bottom, top: widths of the layers of both nets.
    """

    def __init__(
        self,
        num_dense: int,
        num_sparse: int,
        dim: int,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
    ) -> None:
        num_pairs = num_sparse * (num_sparse + 1) // 2
        super().__init__(
            mlp((num_dense, *bottom, dim)),
            DotInteraction(num_sparse + 1, dim),
            output_mlp((dim + num_pairs, *top)),
        )
