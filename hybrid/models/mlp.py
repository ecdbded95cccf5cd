"""Plain nets of linear layers, which every model has some of."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """A linear layer and ReLU from each width to the next."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def output_mlp(widths: Sequence[int], num_outputs: int = 1) -> nn.Sequential:
    """An MLP over ``widths``, then a plain layer to the outputs of a sample; to ``outputs_B`` of one."""
    layers = mlp(widths).append(nn.Linear(widths[-1], num_outputs))
    return layers.append(nn.Flatten(0)) if num_outputs == 1 else layers
