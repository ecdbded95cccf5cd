"""Random values and modules from fixed seeds."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seeded(make: Callable[[], M], seed: int = 0) -> M:
    """Return a module with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
