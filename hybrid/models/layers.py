"""Multilayer perceptrons, and padding of histories of different lengths."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(widths: Sequence[int], num_outputs: int = 0) -> nn.Sequential:
    """Return linear layers of ``widths`` with ReLUs, then a linear layer if ``num_outputs`` > 0."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Linear(widths[-1], num_outputs)] if num_outputs else []))


def output_mlp(widths: Sequence[int], num_outputs: int = 1) -> nn.Sequential:
    """Return an MLP over ``widths`` with a linear output layer; its output is (B,) for one output."""
    layers = mlp(widths, num_outputs)
    return layers.append(nn.Flatten(0)) if num_outputs == 1 else layers


def pad_histories(values_LD: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Pad histories to the length of the longest.

    Args:
        values_LD: the vectors of all histories, one after another, as from ``hybrid.Embedding``.
        offsets: int64, (B + 1); the vectors of sample b are ``values_LD[offsets[b] : offsets[b + 1]]``.

    Returns:
        ``(values_BTD, is_item_BT)``, where T is the longest history; padding is zero and False.
    """
    lengths_B = offsets.diff()
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    is_item_BT = torch.arange(longest, device=lengths_B.device) < lengths_B.unsqueeze(1)
    is_item_BT = is_item_BT.to(values_LD.device)
    values_BTD = values_LD.new_zeros(*is_item_BT.shape, values_LD.size(1))
    indices = is_item_BT.nonzero(as_tuple=True)
    return values_BTD.index_put(indices, values_LD), is_item_BT
