"""Wide & Deep: a linear model that memorizes, and a deep net that generalizes.

Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems" (arXiv 1606.07792), equation 3. Feature k
has an embedding v_k and a weight w_k in the wide part::

    logit = sum of w_k + a . dense + deep([dense, v_1, ..., v_K])

With several outputs per sample, the wide part is added to each output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.dense_net import DenseNet
from hybrid.models.layers import output_mlp


class LinearTerm(nn.Module):
    """The wide part, (B, 1): the sum of the sparse features' weights, plus a linear map of dense features."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        # torch warns if it initializes an empty weight.
        self.dense_weights = nn.Linear(num_dense, 1, bias=False) if num_dense else None

    def forward(self, dense_BF: Tensor, weights_BK: Tensor) -> Tensor:
        term_B1 = weights_BK.sum(dim=1, keepdim=True)
        return term_B1 if self.dense_weights is None else term_B1 + self.dense_weights(dense_BF)


class WideAndDeepInputs(nn.Module):
    """The interaction of Wide & Deep: the wide score in column 0, followed by the inputs of the deep net.

    The vector of a feature is its embedding, followed by its weight; ``widths`` count both.
    """

    def __init__(self, widths: Sequence[int], num_dense: int) -> None:
        super().__init__()
        self.widths = list(widths)
        self.linear = LinearTerm(num_dense)

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        vectors = pooled_BE.split(self.widths, dim=1)
        score_B1 = self.linear(dense_BF, torch.stack([vector[:, -1] for vector in vectors], dim=1))
        return torch.cat([score_B1, dense_BF] + [vector[:, :-1] for vector in vectors], dim=1)


class WideHead(nn.Module):
    """The head of Wide & Deep: the wide score (column 0) plus each output of ``deep`` for columns 1, 2 ..."""

    def __init__(self, deep: nn.Module) -> None:
        super().__init__()
        self.deep = deep

    def forward(self, hidden_BH: Tensor) -> Tensor:
        deep_BO: Tensor = self.deep(hidden_BH[:, 1:])
        wide_B = hidden_BH[:, 0]
        return (wide_B if deep_BO.dim() == 1 else wide_B.unsqueeze(1)) + deep_BO


class WideAndDeep(DenseNet):
    """The model; see :class:`DenseNet` for inputs and outputs.

    Args:
        num_dense: F, the number of dense features; may be 0.
        dims: width of the embedding of each feature. A weight follows it, so tables are wider by 1.
        deep: hidden units of the deep net.
    """

    def __init__(
        self, num_dense: int, dims: Sequence[int], deep: Sequence[int] = (64, 32), num_outputs: int = 1
    ) -> None:
        inputs = WideAndDeepInputs([dim + 1 for dim in dims], num_dense)
        head = output_mlp((num_dense + sum(dims), *deep), num_outputs)
        super().__init__(nn.Identity(), inputs, WideHead(head))
