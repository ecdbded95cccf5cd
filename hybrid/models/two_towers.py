"""Two towers for retrieval: user and item vectors in one space, trained with in-batch negatives.

Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", section 3.
A score is the dot product of the outputs of a user tower u() and an item tower v(). A nearest-neighbor index
thus finds the best of millions of items. A softmax over all items would be too expensive, so the items of the
other samples of the batch serve as negatives. Popular items are negatives more often, with probability q(i).
Subtracting log q from the scores in training corrects this bias::

    s(x, i)  = u(x) . v(i) / temperature                     for serving
    loss(x, i) = -log  exp(s(x, i) - log q(i)) / sum over j of exp(s(x, j) - log q(j))

Here q(i) is the frequency of item i in the training data, which :func:`log_popularity` counts. The paper
estimates q(i) from a stream; any estimate can be passed. The sum is over the item of the sample and all
different items of the batch. ``gather=cluster.gather`` fetches the items of the other trainers and returns
their gradients, so that the loss does not depend on the number of trainers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid.models.layers import mlp


class Tower(nn.Module):
    """The net of one side, whose outputs are vectors of norm 1."""

    def __init__(self, width: int, hidden: Sequence[int], dim: int) -> None:
        super().__init__()
        self.layers = mlp((width, *hidden), dim)

    def forward(self, inputs_BH: Tensor) -> Tensor:
        return F.normalize(self.layers(inputs_BH), dim=1)


class TwoTowers(nn.Module):
    """The model: both towers.

    Args:
        user_width, item_width: width of the inputs of each side.
        hidden: hidden units of each tower.
        dim: D, the width of the output vectors.
    """

    def __init__(
        self, user_width: int, item_width: int, hidden: Sequence[int] = (64,), dim: int = 32
    ) -> None:
        super().__init__()
        self.user = Tower(user_width, hidden, dim)
        self.item = Tower(item_width, hidden, dim)

    def forward(self, users_BH: Tensor, items_BH: Tensor) -> tuple[Tensor, Tensor]:
        return self.user(users_BH), self.item(items_BH)


def log_popularity(ids: Tensor, num_items: int) -> Tensor:
    """Return ``log_q_I``, the logarithm of the frequency of each item in the training data's ``ids``.

    An item that is not in the data counts as if it occurred once.
    """
    counts_I = torch.bincount(ids.flatten(), minlength=num_items).clamp(min=1)
    return torch.log(counts_I / ids.numel())


def in_batch_softmax(
    users_BD: Tensor,
    items_BD: Tensor,
    ids_B: Tensor,
    log_q_B: Tensor,
    temperature: float = 0.1,
    gather: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tensor:
    """Return ``losses_B``, the corrected loss of each sample.

    Args:
        users_BD, items_BD: the outputs of the towers for each sample.
        ids_B: item ids; a sample with the same item is not a negative.
        log_q_B: logarithm of the frequency of each item; zeros for no correction.
        temperature: divides the scores.
        gather: differentiably gathers the slices of all trainers: ``cluster.gather``.
    """
    items_ND, ids_N, log_q_N = (gather(each).to(users_BD.device) for each in (items_BD, ids_B, log_q_B))
    positive_B = (users_BD * items_BD).sum(dim=1) / temperature - log_q_B.to(users_BD)
    negatives_BN = users_BD @ items_ND.mT / temperature - log_q_N.to(users_BD)
    is_same_BN = ids_B.to(ids_N.device).unsqueeze(1) == ids_N
    negatives_BN = negatives_BN.masked_fill(is_same_BN, -torch.inf)
    scores_BM = torch.cat([positive_B.unsqueeze(1), negatives_BN], dim=1)
    target_B = torch.zeros(len(scores_BM), dtype=torch.int64, device=scores_BM.device)
    return F.cross_entropy(scores_BM, target_B, reduction="none")
