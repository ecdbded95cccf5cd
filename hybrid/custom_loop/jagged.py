"""Columns with any number of values per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Jagged(NamedTuple):
    """A column with any number of values per sample.

    Attributes:
        values: the values of all samples, concatenated.
        offsets: int64 of shape (samples + 1), where the values of each sample start.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sequence[Any]], dtype: torch.dtype = torch.int64) -> Jagged:
        """Make a column from one list of values per sample."""
        lengths = torch.tensor([0, *map(len, samples)])
        return cls(torch.tensor([v for sample in samples for v in sample], dtype=dtype), lengths.cumsum(0))

    @property
    def lengths(self) -> Tensor:
        """Number of values of each sample, int64."""
        return self.offsets.diff()

    def samples(self, start: int, stop: int) -> Jagged:
        """Return the samples from ``start`` to ``stop``."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Jagged(self.values[first:last], self.offsets[start : stop + 1] - first)
