"""Self-attention over a history, to tell the next item; SASRec, but for its dropout.

Kang and McAuley 2018, "Self-Attentive Sequential Recommendation" (arXiv 1808.09781), equations 1 to 7. Items
and positions make up the first layer; each block then lets every item look at itself and those before it::

    x_t  = item_t + position_t
    x   := x + Attention(LayerNorm(x))          Attention = softmax(Q K^T / sqrt(D), no look ahead) V
    x   := x + W_2 relu(W_1 LayerNorm(x))
    score of item i after t items = LayerNorm(x)_t . item_i

The table of items is that of the scores, too. Training compares the next item with one that was drawn at
random, at every position (equation 7). Dropout is left out: every trainer would drop others.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention to what came before, then a net over each position.

    Args:
        dim: D; the number of heads divides it.
        num_heads: in how many parts vectors attend by themselves.

    Raises:
        ValueError: it does not.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide vectors of width {dim}")
        self.num_heads = num_heads
        self.attention_norm, self.net_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, x_BTD: Tensor, may_look_BTT: Tensor) -> Tensor:
        """``x_BTD``.

        Args:
            may_look_BTT: whether a position (the row) looks at another; each does at itself.
        """
        normed_BTD = self.attention_norm(x_BTD)
        # (B, heads, T, D / heads)
        query, key, value = (
            layer(normed_BTD).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=may_look_BTT.unsqueeze(1))
        x_BTD = x_BTD + seen.transpose(1, 2).flatten(2)
        after_BTD: Tensor = x_BTD + self.net(self.net_norm(x_BTD))
        return after_BTD


class SelfAttention(nn.Module):
    """What a user wants next, after each item of his history.

    Args:
        dim: D, of the items' vectors.
        longest: T at most.
        num_blocks: how many.
        num_heads: of each block.
    """

    def __init__(self, dim: int, longest: int, num_blocks: int = 2, num_heads: int = 1) -> None:
        super().__init__()
        self.positions_TD = nn.Parameter(torch.empty(longest, dim).normal_(std=dim**-0.5))
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, history_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
        """``wanted_BTD``: its dot product with an item's vector is the item's score.

        Args:
            history_BTD: the oldest item first.
            is_item_BT: False where a history is padded; nothing looks there, and what comes out there means
                nothing.
        """
        length = history_BTD.size(1)
        is_past_TT = torch.ones(length, length, dtype=torch.bool, device=history_BTD.device).tril()
        # Padding looks at itself, for a softmax over nothing has no value.
        is_self_TT = torch.eye(length, dtype=torch.bool, device=history_BTD.device)
        may_look_BTT = (is_past_TT & is_item_BT.unsqueeze(1)) | is_self_TT
        x_BTD = history_BTD + self.positions_TD[:length]
        for block in self.blocks:
            x_BTD = block(x_BTD, may_look_BTT)
        wanted_BTD: Tensor = self.norm(x_BTD)
        return wanted_BTD


def last_of(wanted_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
    """``wanted_BD`` after the last item of each history, to score candidates by; zeros after none."""
    is_last_BT = is_item_BT & (is_item_BT.flip(1).cumsum(1).flip(1) == 1)
    return (wanted_BTD * is_last_BT.unsqueeze(2)).sum(dim=1)


def next_item_loss(
    wanted_BTD: Tensor, next_BTD: Tensor, other_BTD: Tensor, is_item_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """The log loss of the next item against another one, as ``cluster.backward`` takes it.

    Args:
        next_BTD: vectors of the items that came next.
        other_BTD: vectors of items drawn at random, one for each.
        is_item_BT: which positions count.

    Returns:
        ``(losses_B, weights_B)``: the mean over the positions of each sample, and how many there are, so that
        the weighted mean is that over all positions of the batch.
    """
    next_BT, other_BT = (wanted_BTD * next_BTD).sum(dim=2), (wanted_BTD * other_BTD).sum(dim=2)
    losses_BT = (F.softplus(-next_BT) + F.softplus(other_BT)) * is_item_BT
    weights_B = is_item_BT.sum(dim=1).to(losses_BT)
    return losses_BT.sum(dim=1) / weights_B.clamp(min=1), weights_B
