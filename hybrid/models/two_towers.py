"""Two towers for retrieval: users and items as vectors of one space, trained against the batch's other items.

Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", section 3.
A user's tower u() and an item's tower v() meet in a dot product, so that the best of millions of items
are found by an index of nearest neighbours. A softmax over all items would cost too much; the items of the
other samples of the batch stand for them. They come as often as they are popular, q(i), so an item is pushed
away the more, the more popular it is. Taking log q off the scores in training makes up for that::

    s(x, i)  = u(x) . v(i) / temperature                     what is served
    loss(x, i) = -log  exp(s(x, i) - log q(i)) / sum over j of exp(s(x, j) - log q(j))

Here q(i) is the share of item i in the training data, which :func:`log_popularity` counts. (The paper
estimates it from the gaps between an item's appearances, for data without end; any estimate can be given.)
The sum is over the sample's own item and all others of the batch that are not the same item; of a batch that
several trainers share, over the items of all of them: ``gather=cluster.gather`` fetches these, and brings
their gradients back. So the loss does not depend on the number of trainers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid.models.mlp import mlp


class Tower(nn.Module):
    """Inputs of one side to a vector of length 1.

    Args:
        width: of the inputs.
        hidden: widths of the layers; the vector's own comes after them.
        dim: D, of the vector.
    """

    def __init__(self, width: int, hidden: Sequence[int], dim: int) -> None:
        super().__init__()
        widths = (width, *hidden)
        self.layers = mlp(widths).append(nn.Linear(widths[-1], dim))

    def forward(self, inputs_BH: Tensor) -> Tensor:
        return F.normalize(self.layers(inputs_BH), dim=1)


class TwoTowers(nn.Module):
    """Both towers.

    Args:
        user_width, item_width: of the inputs of each side.
        hidden: widths of the layers of each tower.
        dim: D, of the vectors that meet.
    """

    def __init__(
        self, user_width: int, item_width: int, hidden: Sequence[int] = (64,), dim: int = 32
    ) -> None:
        super().__init__()
        self.user = Tower(user_width, hidden, dim)
        self.item = Tower(item_width, hidden, dim)

    def forward(self, users_BH: Tensor, items_BH: Tensor) -> tuple[Tensor, Tensor]:
        """``(users_BD, items_BD)``."""
        return self.user(users_BH), self.item(items_BH)


def log_popularity(ids: Tensor, num_items: int) -> Tensor:
    """``log_q_I``: the logarithm of each item's share of the training data's ``ids``.

    An item that is not in the data counts as if it had been there once.
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
    """The corrected loss of each sample, ``losses_B``.

    Args:
        users_BD, items_BD: what the towers make of each sample's user and item.
        ids_B: of the items; another sample with the same one is no negative.
        log_q_B: logarithm of how often each item comes; zeros for no correction.
        temperature: what scores are divided by.
        gather: from this trainer's share to the whole batch, with gradients: ``cluster.gather``.
    """
    items_ND, ids_N, log_q_N = (gather(each).to(users_BD.device) for each in (items_BD, ids_B, log_q_B))
    own_B = (users_BD * items_BD).sum(dim=1) / temperature - log_q_B.to(users_BD)
    others_BN = users_BD @ items_ND.mT / temperature - log_q_N.to(users_BD)
    is_same_BN = ids_B.to(ids_N.device).unsqueeze(1) == ids_N
    others_BN = others_BN.masked_fill(is_same_BN, -torch.inf)
    scores_BM = torch.cat([own_B.unsqueeze(1), others_BN], dim=1)
    is_first_B = torch.zeros(len(scores_BM), dtype=torch.int64, device=scores_BM.device)
    return F.cross_entropy(scores_BM, is_first_B, reduction="none")
