"""SASRec without dropout: self-attention over a history predicts the next item.

Kang and McAuley 2018, "Self-Attentive Sequential Recommendation" (arXiv 1808.09781), equations 1 to 7. The
first layer adds item and position embeddings. In each block, an item attends to itself and to earlier items::

    x_t  = item_t + position_t
    x   := x + Attention(LayerNorm(x))          Attention = softmax(Q K^T / sqrt(D), causal) V
    x   := x + W_2 relu(W_1 LayerNorm(x))
    score of item i after t items = LayerNorm(x)_t . item_i

Inputs and scores share the item embeddings. At every position, training compares the next item with an item
drawn at random (equation 7). There is no dropout: its masks would depend on the number of trainers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AttentionBlock(nn.Module):
    """A transformer block: self-attention, then a feed-forward net at each position.

    Raise ValueError if ``num_heads`` does not divide ``dim``.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide vectors of width {dim}")
        self.num_heads = num_heads
        self.attention_norm, self.net_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, x_BTD: Tensor, mask_BTT: Tensor) -> Tensor:
        """Return ``x_BTD`` after this block.

        ``mask_BTT`` says whether a position (row) attends to a position (column); True on the diagonal.
        """
        normed_BTD = self.attention_norm(x_BTD)
        query, key = self._heads(self.query(normed_BTD)), self._heads(self.key(normed_BTD))
        value = self._heads(self.value(normed_BTD))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_BTT.unsqueeze(1))
        x_BTD = x_BTD + attended.transpose(1, 2).flatten(2)
        output_BTD: Tensor = x_BTD + self.net(self.net_norm(x_BTD))
        return output_BTD

    def _heads(self, values_BTD: Tensor) -> Tensor:
        values_BTHE: Tensor = values_BTD.unflatten(2, [self.num_heads, -1])
        return values_BTHE.transpose(1, 2)


class SelfAttention(nn.Module):
    """The model: a query for the next item, after each item of a history.

    Args:
        dim: D, the width of the item vectors.
        longest: the largest T, the number of items of the longest possible history.
        num_heads: ValueError unless it divides D.
    """

    def __init__(self, dim: int, longest: int, num_blocks: int = 2, num_heads: int = 1) -> None:
        super().__init__()
        self.positions_TD = nn.Parameter(torch.normal(0.0, dim**-0.5, (longest, dim)))
        self.blocks = nn.ModuleList(AttentionBlock(dim, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, history_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
        """Return ``queries_BTD``; the score of an item is the dot product of its vector and a query.

        Args:
            history_BTD: the vectors of the items, the oldest first; T is at most ``longest``.
            is_item_BT: False for padding. No item attends to padding; queries at padding are meaningless.
        """
        length = history_BTD.size(1)
        is_past_TT = torch.ones(length, length, dtype=torch.bool, device=history_BTD.device).tril()
        # Padding attends to itself, since a softmax over nothing is NaN.
        is_self_TT = torch.eye(length, dtype=torch.bool, device=history_BTD.device)
        mask_BTT = (is_past_TT & is_item_BT.unsqueeze(1)) | is_self_TT
        x_BTD = history_BTD + self.positions_TD[:length]
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_BTT)
        queries_BTD: Tensor = self.norm(x_BTD)
        return queries_BTD


def last_queries(queries_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
    """Return the query after the last item of each history, (B, D); zeros for an empty history."""
    is_last_BT = is_item_BT & (is_item_BT.flip(1).cumsum(1).flip(1) == 1)
    return (queries_BTD * is_last_BT.unsqueeze(2)).sum(dim=1)


class LastQuery(nn.Module):
    """The elementwise product of a candidate and the last query. The sum of the elements is the score.

    Args:
        attention: maps ``history_BTD`` and ``is_item_BT`` to ``queries_BTD``, such as :class:`SelfAttention`.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, candidate_BD: Tensor, history_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
        """Return ``user_BD``, zeros for an empty history."""
        return last_queries(self.attention(history_BTD, is_item_BT), is_item_BT) * candidate_BD


def next_item_loss(
    queries_BTD: Tensor, next_BTD: Tensor, other_BTD: Tensor, is_item_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log loss of the next item against an item drawn at random, for ``cluster.backward``.

    Args:
        next_BTD: vector of the next item at each position.
        other_BTD: vector of an item drawn at random at each position.
        is_item_BT: whether a position counts in the loss.

    Returns:
        ``(losses_B, weights_B)``: for each sample, the mean loss over positions that count, and their number.
        With these weights, the mean over samples is the mean over all such positions of the batch.
    """
    next_BT, other_BT = (queries_BTD * next_BTD).sum(dim=2), (queries_BTD * other_BTD).sum(dim=2)
    losses_BT = (F.softplus(-next_BT) + F.softplus(other_BT)) * is_item_BT
    weights_B = is_item_BT.sum(dim=1).to(losses_BT)
    return losses_BT.sum(dim=1) / weights_B.clamp(min=1), weights_B
