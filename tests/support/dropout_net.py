"""A net of one's own that draws random numbers, has running statistics, and an optimizer with state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybrid.config import RunConfig
from hybrid.dense.nets import DenseNet
from hybrid.input_spec import InputSpec


class _SideBySide(nn.Module):
    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        return torch.cat([dense_BF, pooled_BE], dim=1)


def build(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> DenseNet:
    """Made to be named as ``dense.net``."""
    width = len(input_spec.dense_features) + sum(widths)
    head = (
        nn.Dropout(0.5),
        nn.Linear(width, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 1),
        nn.Flatten(0),
    )
    return DenseNet(nn.Identity(), _SideBySide(), nn.Sequential(*head))
