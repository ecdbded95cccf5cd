"""Tables as they are served: rows in float32, or in fewer bits."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_LARGEST = 127  # of int8, either way
_ROWS_AT_ONCE = 1 << 16


class StoredRows(NamedTuple):
    """Rows in some type.

    Attributes:
        rows_RD: float32, bfloat16 or int8.
        scale_R: float32, what the values of each row of int8 are multiples of; None for other types.
    """

    rows_RD: Tensor
    scale_R: Tensor | None = None

    def values(self, first: int, last: int) -> Tensor:
        """What some of the rows stand for, in float32."""
        rows = self.rows_RD[first:last].float()
        return rows if self.scale_R is None else rows * self.scale_R[first:last].unsqueeze(1)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """As they are named in a file: the rows as ``name``, the scale as ``name.scale``."""
        return {name: self.rows_RD} | ({} if self.scale_R is None else {f"{name}.scale": self.scale_R})

    def largest_change(self, of_RD: Tensor) -> float:
        """The largest difference to a value of the rows that they were made of."""
        changes = [
            (block_RD.double() - self.values(start, start + len(block_RD)).double()).abs().max().item()
            for start, block_RD in _blocks(of_RD)
        ]
        return max(changes)


def stored_rows(rows_RD: Tensor, kind: str) -> StoredRows:
    """Rows in another type: float32, bfloat16 or int8.

    int8 is symmetric, each row by itself: its largest value is 127 times the row's scale.
    """
    if kind != "int8":
        return StoredRows(rows_RD.to(getattr(torch, kind)))
    stored = StoredRows(torch.empty(rows_RD.shape, dtype=torch.int8), torch.empty(len(rows_RD)))
    for start, block_RD in _blocks(rows_RD):
        scale_R = block_RD.abs().amax(1).float() / _LARGEST
        scale_R[scale_R == 0] = 1.0  # of a row of zeros
        assert stored.scale_R is not None
        stored.scale_R[start : start + len(block_RD)] = scale_R
        steps = (block_RD / scale_R.unsqueeze(1)).round().clamp(-_LARGEST, _LARGEST)
        stored.rows_RD[start : start + len(block_RD)] = steps.to(torch.int8)
    return stored


class NarrowTable(nn.Module):
    """A table of rows in fewer bits; what it gives is of a type of its own.

    Args:
        stored: the rows.
        dtype: of the vectors.
    """

    rows_RD: Tensor
    scale_R: Tensor | None

    def __init__(self, stored: StoredRows, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("rows_RD", stored.rows_RD)
        self.register_buffer("scale_R", stored.scale_R)
        self._dtype = dtype

    def forward(self, ids_L: Tensor) -> Tensor:
        """Vectors (ids, D)."""
        rows_LD = self.rows_RD.index_select(0, ids_L).to(self._dtype)
        if self.scale_R is None:
            return rows_LD
        return rows_LD * self.scale_R.index_select(0, ids_L).to(self._dtype).unsqueeze(1)


def _blocks(rows_RD: Tensor) -> Sequence[tuple[int, Tensor]]:
    parts = rows_RD.detach().split(_ROWS_AT_ONCE)
    return [(number * _ROWS_AT_ONCE, part) for number, part in enumerate(parts)]
