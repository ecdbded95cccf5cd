"""DIN, the deep interest network: a candidate item weights the items of the user's history.

Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction" (arXiv 1706.06978), equation 3.
For a candidate c, a user is the sum of the clicked items e_t, weighted by their relevance to c::

    user(c) = sum over t of  a(e_t, c) * e_t            a(e, c) = MLP([c, e, c - e, c * e])

The weights are not normalized: a history with many relevant items shows a stronger interest than a history
with one relevant item, and a softmax would make both equal. The inputs of a() follow the authors' code.
The activation of the authors, Dice, depends on the statistics of a batch. A ReLU replaces Dice here, so that
the score of a sample does not depend on other samples.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.layers import output_mlp


class InterestAttention(nn.Module):
    """Sum of a history, weighted by relevance to a candidate; a() has hidden layers of widths ``hidden``."""

    def __init__(self, dim: int, hidden: Sequence[int] = (32,)) -> None:
        super().__init__()
        self.relevance = output_mlp((4 * dim, *hidden))

    def forward(self, candidate_BD: Tensor, history_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
        """Return ``user_BD``, zeros for an empty history; ``is_item_BT`` is False for padding."""
        candidate_BTD = candidate_BD.unsqueeze(1).expand_as(history_BTD)
        pairs_BTH = torch.cat(
            [candidate_BTD, history_BTD, candidate_BTD - history_BTD, candidate_BTD * history_BTD], dim=2
        )
        relevance_BT: Tensor = self.relevance(pairs_BTH.flatten(0, 1)).view(is_item_BT.shape)
        weights_BT = relevance_BT * is_item_BT
        return (weights_BT.unsqueeze(2) * history_BTD).sum(dim=1)


class DIN(nn.Module):
    """The model: logits from a candidate, a history, and other inputs.

    Args:
        dim: D, the width of the vectors of candidate and items.
        num_other: width of all other inputs; may be 0.
        attention: hidden units of the net that weights an item.
        hidden: hidden units of the net over user, candidate and other inputs.
    """

    def __init__(
        self, dim: int, num_other: int = 0, attention: Sequence[int] = (32,), hidden: Sequence[int] = (64, 32)
    ) -> None:
        super().__init__()
        self.interest = InterestAttention(dim, attention)
        self.score = output_mlp((2 * dim + num_other, *hidden))

    def forward(
        self, candidate_BD: Tensor, history_BTD: Tensor, is_item_BT: Tensor, other_BH: Tensor | None = None
    ) -> Tensor:
        """Return ``logits_B``; ``is_item_BT`` is False for padding, ``other_BH`` has width ``num_other``."""
        user_BD = self.interest(candidate_BD, history_BTD, is_item_BT)
        other = [] if other_BH is None else [other_BH]
        logits_B: Tensor = self.score(torch.cat([user_BD, candidate_BD, *other], dim=1))
        return logits_B
