"""DCN-v2: each cross layer multiplies the inputs with what the layers before have made of them.

Wang et al. 2021, "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank
Systems" (arXiv 2008.13535), equation 1, with the deep net after the cross layers ("stacked")::

    x_{l+1} = x_0 * (W_l x_l + b_l) + x_l              logit = deep(x_L)

After L layers there are products of up to L + 1 inputs.
"""

from collections.abc import Sequence

from torch import nn

from hybrid.dense.nets import CrossInteraction, DenseNet, output_mlp


class DCNv2(DenseNet):
    """Called with ``dense_BF`` and ``pooled_BE``, gives ``logits_B``.

    Args:
        width: F + E, of all inputs.
        num_layers: L.
        deep: widths of the layers of the deep net.
    """

    def __init__(self, width: int, num_layers: int = 2, deep: Sequence[int] = (64, 32)) -> None:
        super().__init__(nn.Identity(), CrossInteraction(width, num_layers), output_mlp((width, *deep)))
