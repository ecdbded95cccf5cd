"""DIN, the deep interest network: what of a history counts depends on the candidate.

Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction" (arXiv 1706.06978), equation 3.
To a candidate c, a user is the sum of what he has clicked on, each item e_t weighted by its bearing on c::

    user(c) = sum over t of  a(e_t, c) * e_t            a(e, c) = MLP([c, e, c - e, c * e])

The weights do not add up to 1: a history full of what is like the candidate is a stronger interest than one
with a single such item, and a softmax would make them equal. The inputs of a() are those of the authors'
code. Their Dice, a ReLU whose bend follows the statistics of a batch, is a plain ReLU here, so that no sample
has a say in the score of another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.mlp import output_mlp


class InterestAttention(nn.Module):
    """A history as one vector, as a candidate sees it.

    Args:
        dim: D, of the vectors of candidate and items.
        hidden: widths of the layers of a().
    """

    def __init__(self, dim: int, hidden: Sequence[int] = (32,)) -> None:
        super().__init__()
        self.bearing = output_mlp((4 * dim, *hidden))

    def forward(self, candidate_BD: Tensor, history_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
        """``user_BD``; zeros where a history is empty.

        Args:
            is_item_BT: False where a history is padded.
        """
        candidate_BTD = candidate_BD.unsqueeze(1).expand_as(history_BTD)
        pairs_BTH = torch.cat(
            [candidate_BTD, history_BTD, candidate_BTD - history_BTD, candidate_BTD * history_BTD], dim=2
        )
        bearing_BT: Tensor = self.bearing(pairs_BTH.flatten(0, 1)).view(is_item_BT.shape)
        weights_BT = bearing_BT * is_item_BT
        return (weights_BT.unsqueeze(2) * history_BTD).sum(dim=1)


class DIN(nn.Module):
    """Logits from a candidate, a history, and whatever else is known of a sample.

    Args:
        dim: D, of the vectors of candidate and items.
        num_other: width of the other inputs, side by side; 0 where there are none.
        attention: widths of the layers that weigh an item.
        hidden: widths of the layers over everything.
    """

    def __init__(
        self,
        dim: int,
        num_other: int = 0,
        attention: Sequence[int] = (32,),
        hidden: Sequence[int] = (64, 32),
    ) -> None:
        super().__init__()
        self.interest = InterestAttention(dim, attention)
        self.score = output_mlp((2 * dim + num_other, *hidden))

    def forward(
        self, candidate_BD: Tensor, history_BTD: Tensor, is_item_BT: Tensor, other_BH: Tensor | None = None
    ) -> Tensor:
        """``logits_B``; see :class:`InterestAttention`."""
        user_BD = self.interest(candidate_BD, history_BTD, is_item_BT)
        other = [] if other_BH is None else [other_BH]
        logits_B: Tensor = self.score(torch.cat([user_BD, candidate_BD, *other], dim=1))
        return logits_B
