"""Any number of values a sample, in a batch of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Jagged(NamedTuple):
    """Any number of values a sample.

    Attributes:
        values: those of all samples, one sample after another.
        offsets: int64 of shape (samples + 1), where those of each sample start.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sequence[Any]], dtype: torch.dtype = torch.int64) -> Jagged:
        """Of a list for each sample."""
        lengths = torch.tensor([0, *map(len, samples)])
        return cls(torch.tensor([v for sample in samples for v in sample], dtype=dtype), lengths.cumsum(0))

    @property
    def lengths(self) -> Tensor:
        """How many values each sample has, int64."""
        return self.offsets.diff()

    def samples(self, start: int, stop: int) -> Jagged:
        """The samples from ``start`` to ``stop``."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Jagged(self.values[first:last], self.offsets[start : stop + 1] - first)
