"""FinalMLP: two MLPs over differently weighted inputs, and a bilinear form of their outputs.

Mao et al. 2023, "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction" (arXiv 2304.00902), section
3. Each stream weights the inputs x by a context, such as the vector of the user or of the item. A
bilinear form combines the outputs o and p of the streams, head by head::

    o = MLP_1(x * gate_1)      gate_1 = 2 * sigmoid(MLP(context_1))                   p likewise
    logit = b + w . o + v . p + sum over heads h of  o_h . (W_h p_h)

o_h and p_h are slice h of o and p. A gate whose MLP returns 0 leaves the input unchanged.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.layers import mlp


class FeatureGate(nn.Module):
    """A layer that multiplies each input by a factor between 0 and 2, which depends on a context."""

    def __init__(self, context: int, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = mlp((context, hidden), width)

    def forward(self, inputs_BE: Tensor, context_BH: Tensor) -> Tensor:
        return inputs_BE * 2 * torch.sigmoid(self.layers(context_BH))


class BilinearFusion(nn.Module):
    """``logits_B`` from two vectors: a linear form of each, plus a bilinear form of both for each head.

    Raise ValueError if ``num_heads`` does not divide both widths, ``first`` and ``second``.
    """

    def __init__(self, first: int, second: int, num_heads: int) -> None:
        super().__init__()
        if first % num_heads or second % num_heads:
            raise ValueError(f"{num_heads} heads do not divide streams of widths {first} and {second}")
        self.num_heads = num_heads
        self.first = nn.Linear(first, 1)
        self.second = nn.Linear(second, 1, bias=False)
        self.products_NHG = nn.Parameter(torch.empty(num_heads, first // num_heads, second // num_heads))
        for products_HG in self.products_NHG.detach():
            nn.init.xavier_normal_(products_HG)

    def forward(self, first_BH: Tensor, second_BG: Tensor) -> Tensor:
        first_BNH = first_BH.unflatten(1, (self.num_heads, -1))
        second_BNG = second_BG.unflatten(1, (self.num_heads, -1))
        pairs_B = torch.einsum("bnh,nhg,bng->b", first_BNH, self.products_NHG, second_BNG)
        linear_B1: Tensor = self.first(first_BH) + self.second(second_BG)
        return linear_B1.squeeze(1) + pairs_B


class FinalMLP(nn.Module):
    """The model: logits from inputs and two contexts.

    Args:
        width: E, the width of the inputs.
        contexts: widths of the two contexts.
        first, second: hidden units of the two streams.
        gate: hidden units of each gate.
        num_heads: heads of the bilinear form. ValueError unless it divides the last width of each stream.
    """

    def __init__(
        self,
        width: int,
        contexts: tuple[int, int],
        first: Sequence[int] = (64, 32),
        second: Sequence[int] = (64, 32),
        gate: int = 32,
        num_heads: int = 4,
    ) -> None:
        super().__init__()
        self.gates = nn.ModuleList(FeatureGate(context, width, gate) for context in contexts)
        self.streams = nn.ModuleList(mlp((width, *hidden)) for hidden in (first, second))
        self.fusion = BilinearFusion(first[-1], second[-1], num_heads)

    def forward(self, inputs_BE: Tensor, first_BH: Tensor, second_BG: Tensor) -> Tensor:
        """Return ``logits_B``; ``first_BH`` and ``second_BG`` are the contexts."""
        stages = zip(self.streams, self.gates, (first_BH, second_BG), strict=True)
        logits_B: Tensor = self.fusion(
            *(stream(gate(inputs_BE, context)) for stream, gate, context in stages)
        )
        return logits_B
