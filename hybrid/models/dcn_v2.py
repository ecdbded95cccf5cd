"""DCN-v2: cross layers multiply the inputs by the output of the previous layer.

Wang et al. 2021, "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank
Systems" (arXiv 2008.13535), equation 1, with the deep net after the cross layers ("stacked")::

    x_{l+1} = x_0 * (W_l x_l + b_l) + x_l              logit = deep(x_L)

After L layers, the result has products of up to L + 1 inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.dense_net import DenseNet
from hybrid.models.layers import output_mlp


class CrossInteraction(nn.Module):
    """The interaction of DCN-v2: cross layers over the concatenation of numeric features and embeddings."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        x0_BH = x_BH = torch.cat([dense_BF, pooled_BE], dim=1)
        for layer in self.layers:
            x_BH = torch.addcmul(x_BH, x0_BH, layer(x_BH))
        return x_BH


class DCNv2(DenseNet):
    """The model; see :class:`DenseNet` for inputs and outputs.

    Args:
        width: F + E, the width of all inputs.
        num_layers: L, the number of cross layers.
        deep: hidden units of the deep net.
    """

    def __init__(
        self, width: int, num_layers: int = 2, deep: Sequence[int] = (64, 32), num_outputs: int = 1
    ) -> None:
        head = output_mlp((width, *deep), num_outputs)
        super().__init__(nn.Identity(), CrossInteraction(width, num_layers), head)
