"""Wide & Deep: a linear model that memorizes, and a deep net that generalizes.

Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems" (arXiv 1606.07792), equation 3. Feature k
has an embedding v_k and a weight w_k in the wide part::

    logit = sum of w_k + a . dense + deep([dense, v_1, ..., v_K])

With several outputs per sample, the wide part is added to each.
"""

# No postponed annotations here: TorchScript checks those of buffers, as types.

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from hybrid.models.dense_net import DenseNet
from hybrid.models.mlp import output_mlp


class LinearTerm(nn.Module):
    """The wide part: the weights of the sparse features, plus a linear map of the dense features."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        # torch warns when it initializes an empty weight.
        self.dense_weights = nn.Linear(num_dense, 1, bias=False) if num_dense else None

    def forward(self, dense_BF: Tensor, weights_BK: Tensor) -> Tensor:
        term_B1 = weights_BK.sum(dim=1, keepdim=True)
        return term_B1 if self.dense_weights is None else term_B1 + self.dense_weights(dense_BF)


class WideAndDeepInputs(nn.Module):
    """Returns the wide score in column 0, then the inputs of the deep net.

    The vector of a feature is its embedding, of any width, followed by its weight in the wide part.
    """

    wide_K: Tensor
    deep_E: Tensor

    def __init__(self, widths: Sequence[int], num_dense: int) -> None:
        super().__init__()
        wide = [end - 1 for end in accumulate(widths)]
        deep = sorted(set(range(sum(widths))).difference(wide))
        self.register_buffer("wide_K", torch.tensor(wide, dtype=torch.int64), persistent=False)
        self.register_buffer("deep_E", torch.tensor(deep, dtype=torch.int64), persistent=False)
        self.linear = LinearTerm(num_dense)

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        score_B1 = self.linear(dense_BF, pooled_BE.index_select(1, self.wide_K))
        return torch.cat([score_B1, dense_BF, pooled_BE.index_select(1, self.deep_E)], dim=1)


class WideHead(nn.Module):
    """Adds the wide score in column 0 to each output of ``deep``, which takes the other columns."""

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
        dims: width of the embedding of each feature. Its weight follows, so tables are wider by 1.
        deep: hidden units of the deep net.
    """

    def __init__(
        self,
        num_dense: int,
        dims: Sequence[int],
        deep: Sequence[int] = (64, 32),
        *,
        num_outputs: int = 1,
        remote_width: int = 0,
    ) -> None:
        inputs = WideAndDeepInputs([dim + 1 for dim in dims], num_dense)
        widths = (remote_width,) if remote_width else (num_dense + sum(dims), *deep)
        head = output_mlp(widths, num_outputs)
        super().__init__(nn.Identity(), inputs, head if remote_width else WideHead(head))
