"""HSTU: attention without softmax over a long history predicts the next item.

Zhai et al. 2024, "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations" (arXiv 2402.17152), equations 1 to 3. In each block, with n the longest possible history::

    U, V, Q, K = silu(W_1 LayerNorm(x))
    A_ts = silu(Q_t . K_s + b_(t-s)) / n  for s <= t, else 0
    x   := x + W_2 (LayerNorm(A V) * U)

The weights of items do not sum to 1, so that the number of similar items counts. The learned bias b replaces
position embeddings. As in SASRec (``self_attention``), the score of an item is LayerNorm(x)_t . item_i. The
paper's bias for the time between two items is left out, and there is no dropout.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SHORTEST_BUCKET = 32  # below this length, calls cost more than padding


class HSTUBlock(nn.Module):
    """A block: projection, attention without softmax, and a gate.

    Raise ValueError if ``num_heads`` does not divide ``dim``.
    """

    def __init__(self, dim: int, longest: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide vectors of width {dim}")
        self.num_heads, self.longest = num_heads, longest
        self.norm, self.attention_norm = nn.LayerNorm(dim), nn.LayerNorm(dim, eps=1e-6)
        self.projection, self.output = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim)
        self.biases_T = nn.Parameter(torch.normal(0.0, 0.02, (longest,)))

    def forward(self, x_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
        """Return ``x_BTD`` after this block; no position attends to padding (``is_item_BT`` is False)."""
        gate_BTD, value_BTD, query_BTD, key_BTD = F.silu(self.projection(self.norm(x_BTD))).chunk(4, dim=2)
        value = self._heads(value_BTD * is_item_BT.unsqueeze(2) / self.longest)
        length = x_BTD.size(1)
        # Row t is (b_t, ..., b_0, -1e4, ...), a window of one vector; silu(-1e4) and its derivative are 0.
        biases_W = F.pad(self.biases_T[:length].flip(0), [0, length], value=-1e4)
        biases_TT = biases_W.unfold(0, length, 1)[:-1].flip(0)
        weights = F.silu(torch.baddbmm(biases_TT, self._heads(query_BTD), self._heads(key_BTD).mT))
        attended_BHTE = (weights @ value).unflatten(0, [-1, self.num_heads])
        attended_BTD = attended_BHTE.transpose(1, 2).flatten(2)
        output_BTD: Tensor = x_BTD + self.output(self.attention_norm(attended_BTD) * gate_BTD)
        return output_BTD

    def _heads(self, values_BTD: Tensor) -> Tensor:
        values_BTHE: Tensor = values_BTD.unflatten(2, [self.num_heads, -1])
        return values_BTHE.transpose(1, 2).flatten(0, 1)


class HSTU(nn.Module):
    """The model: a query for the next item, after each item of a history.

    One long history does not slow down all samples: samples of similar length are computed as a group, padded
    to ``longest`` or to a smaller power of two, at least 32. The last item determines the length, so padding
    before the items counts. A compiled or exported net computes all samples as one group.

    Args:
        dim: D, the width of the item vectors.
        longest: the number of items of the longest possible history, at least 1.
        num_heads: ValueError unless it divides D.
    """

    def __init__(self, dim: int, longest: int, num_blocks: int = 2, num_heads: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HSTUBlock(dim, longest, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        powers = [_SHORTEST_BUCKET * 2**k for k in range(longest.bit_length())]
        self.bucket_widths = [*(width for width in powers if width < longest), longest]

    def forward(self, history_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
        """Return ``queries_BTD``; the score of an item is the dot product of its vector and a query.

        Queries at padding (``is_item_BT`` is False) are meaningless. ValueError, except in a compiled net, if
        the last item of a history is not in the first ``longest`` positions.
        """
        if torch.compiler.is_compiling():  # the buckets depend on the data
            return self._padded(history_BTD, is_item_BT)
        lengths_B, order_B = is_item_BT.flip(1).cumsum(1).gt(0).sum(1).sort(stable=True)
        widths = torch.tensor(self.bucket_widths, device=lengths_B.device)
        ends_W = torch.searchsorted(lengths_B, widths, right=True)
        ends: list[int] = ends_W.tolist() if len(lengths_B) else [0]  # the meta device has no values
        if ends[-1] < len(lengths_B):
            raise ValueError(f"a history is longer than {self.bucket_widths[-1]} items")
        is_item_chunks = is_item_BT[order_B].tensor_split(ends[:-1])
        queries: list[Tensor] = []
        for index, history in enumerate(history_BTD[order_B].tensor_split(ends[:-1])):
            if len(history) or not queries:  # also for no samples, so that every parameter has a gradient
                width = self.bucket_widths[index]
                each = self._padded(history[:, :width], is_item_chunks[index][:, :width])
                queries.append(F.pad(each, [0, 0, 0, history.size(1) - each.size(1)]))
        return torch.cat(queries)[order_B.argsort()]

    def _padded(self, x_BTD: Tensor, is_item_BT: Tensor) -> Tensor:
        for block in self.blocks:
            x_BTD = block(x_BTD, is_item_BT)
        queries_BTD: Tensor = self.norm(x_BTD)
        return queries_BTD
