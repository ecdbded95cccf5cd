"""A table whose rows stay in the files of a checkpoint."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn


class MappedTable(nn.Module):
    """Reads the rows that a batch needs from memory-mapped shards; the table may be larger than memory.

    Args:
        shards: shard ``i`` of ``n`` holds the rows ``i``, ``i + n``, ``i + 2n``, ...
        dtype: data type of the vectors.
    """

    def __init__(self, shards: Sequence[npt.NDArray[Any]], dtype: torch.dtype) -> None:
        super().__init__()
        self._shards = shards
        self._dtype = dtype

    def forward(self, ids_L: Tensor) -> Tensor:
        """Vectors (ids, D)."""
        rows_U, inverse_L = ids_L.unique(return_inverse=True)
        vectors_UD = torch.empty(len(rows_U), self._shards[0].shape[1], dtype=self._dtype)
        rows, count = rows_U.numpy(), len(self._shards)
        for index, shard in enumerate(self._shards):
            is_of_shard = rows % count == index
            vectors_UD.numpy()[is_of_shard] = shard[rows[is_of_shard] // count]
        return vectors_UD[inverse_L]
