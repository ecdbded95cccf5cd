"""Parts of a model for tests that need no workers: vectors at hand, and the plainest interaction."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Vectors:
    """A lookup that is answered with values at hand."""

    def __init__(self, pooled_BE: Tensor) -> None:
        self.pooled_BE = pooled_BE

    def start(self) -> Vectors:
        return self

    def wait(self) -> Tensor:
        return self.pooled_BE


class Concatenation(nn.Module):
    """Both inputs side by side."""

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        return torch.cat([bottom_BH, pooled_BE], dim=1)
