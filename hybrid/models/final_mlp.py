"""FinalMLP: two plain nets that see the inputs differently, and a bilinear form of what they make of them.

Mao et al. 2023, "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction" (arXiv 2304.00902), section
3. Each stream weighs the inputs x by what it is told of a context, such as the user's vector for one and
the item's for the other, and the outputs o and p of the streams meet in a bilinear form, head by head::

    o = MLP_1(x * gate_1)      gate_1 = 2 * sigmoid(MLP(context_1))                   p likewise
    logit = b + w . o + v . p + sum over heads h of  o_h . (W_h p_h)

o_h and p_h are the h-th part of o and p. A gate of 1, where its MLP gives 0, leaves an input as it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid.models.mlp import mlp


class FeatureGate(nn.Module):
    """Weighs each input, between 0 and 2, by a context.

    Args:
        context: width of the context.
        width: of the inputs.
        hidden: width of the layer between.
    """

    def __init__(self, context: int, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = mlp((context, hidden)).append(nn.Linear(hidden, width))

    def forward(self, inputs_BE: Tensor, context_BH: Tensor) -> Tensor:
        """``weighed_BE``."""
        return inputs_BE * 2 * torch.sigmoid(self.layers(context_BH))


class BilinearFusion(nn.Module):
    """Logits of two vectors: a linear form of each, and a bilinear one of each pair of parts.

    Args:
        first, second: their widths.
        num_heads: in how many parts each is cut; divides both widths.

    Raises:
        ValueError: it does not.
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
        """``logits_B``."""
        first_BNH = first_BH.unflatten(1, (self.num_heads, -1))
        second_BNG = second_BG.unflatten(1, (self.num_heads, -1))
        pairs_B = torch.einsum("bnh,nhg,bng->b", first_BNH, self.products_NHG, second_BNG)
        linear_B1: Tensor = self.first(first_BH) + self.second(second_BG)
        return linear_B1.squeeze(1) + pairs_B


class FinalMLP(nn.Module):
    """Logits from inputs and two contexts.

    Args:
        width: of the inputs.
        contexts: widths of the two contexts.
        first, second: widths of the layers of the two streams.
        gate: width of the layer in each gate.
        num_heads: parts of the bilinear form; divides the last widths of both streams.
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
        """``logits_B``.

        Args:
            first_BH, second_BG: the contexts.
        """
        contexts = (first_BH, second_BG)
        weighed = [gate(inputs_BE, context) for gate, context in zip(self.gates, contexts, strict=True)]
        streams = [stream(x_BE) for stream, x_BE in zip(self.streams, weighed, strict=True)]
        logits_B: Tensor = self.fusion(*streams)
        return logits_B
