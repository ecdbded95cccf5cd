"""Wide & Deep: a linear model that remembers, and a deep net that generalises.

Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems" (arXiv 1606.07792), equation 3. Feature k
has an embedding v_k and a weight w_k in the wide part::

    logit = sum of w_k + a . dense + deep([dense, v_1, ..., v_K])
"""

from collections.abc import Sequence

from torch import nn

from hybrid.dense.nets import DenseNet, WideAndDeepInputs, WideHead, output_mlp


class WideAndDeep(DenseNet):
    """Called with ``dense_BF`` and ``pooled_BE``, gives ``logits_B``.

    Args:
        num_dense: F.
        dims: of each feature's embedding; its weight comes after it, so tables are wider by 1.
        deep: widths of the layers of the deep net.
    """

    def __init__(self, num_dense: int, dims: Sequence[int], deep: Sequence[int] = (64, 32)) -> None:
        inputs = WideAndDeepInputs([dim + 1 for dim in dims], num_dense)
        super().__init__(nn.Identity(), inputs, WideHead(output_mlp((num_dense + sum(dims), *deep))))
