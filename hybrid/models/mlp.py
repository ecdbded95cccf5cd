"""Multilayer perceptrons."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Return a linear layer and a ReLU from each width to the next."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def output_mlp(widths: Sequence[int], num_outputs: int = 1) -> nn.Sequential:
    """Return an MLP over ``widths`` with a linear output layer, flattened to ``outputs_B`` for one output."""
    layers = mlp(widths).append(nn.Linear(widths[-1], num_outputs))
    return layers.append(nn.Flatten(0)) if num_outputs == 1 else layers
