"""Stochastic rounding of rows to bfloat16 in the reference.

This module shares no code with ``kernels.py``. It compares the position of a value between its neighbors in
bfloat16 with a random number. Both use SplitMix64, which defines the random numbers.
"""

import numpy as np
import torch
from torch import Tensor

from hybrid.embedding.initial_rows import random_salt
from hybrid.primitives.splitmix64 import next_of

_STEP = 0x9E3779B97F4A7C15  # from one state of SplitMix64 to the next
_LARGEST = torch.finfo(torch.bfloat16).max


def round_stochastically(rows_UD: Tensor, numbers_U: Tensor, seed: int, step: int, table: str) -> Tensor:
    """Return rows in bfloat16, each value rounded up or down at random.

    Args:
        numbers_U: number of each row in its table; for a growing table, its key, as int64.
    """
    single_UD = rows_UD.float()
    lower_UD = (single_UD.view(torch.int32) & ~0xFFFF).view(torch.float32)  # the neighbor closer to zero
    upper_UD = (lower_UD.view(torch.int32) + 0x10000).view(torch.float32)
    position_UD = (single_UD.double() - lower_UD) / (upper_UD.double() - lower_UD)
    is_raised_UD = position_UD * 2**16 + _random(rows_UD.shape[1], numbers_U, seed, step, table) >= 2**16
    rounded_UD = torch.where(is_raised_UD, upper_UD, lower_UD).clamp(-_LARGEST, _LARGEST)
    return torch.where(single_UD.isfinite(), rounded_UD, single_UD).to(torch.bfloat16)


def _random(dim: int, numbers_U: Tensor, seed: int, step: int, table: str) -> Tensor:
    """Return random numbers of 16 bits (U, D): the bits of a sequence of 64-bit numbers for each row."""
    salt_1 = next_of(np.array([random_salt(seed, table)], np.uint64) + np.uint64(step))
    state_U1 = next_of(salt_1 + numbers_U.numpy().astype(np.uint64))[:, None]
    index_N = np.arange(-(-dim // 4), dtype=np.uint64)
    words_UN = next_of(state_U1 + index_N * np.uint64(_STEP))
    return torch.from_numpy(words_UN.astype("<u8").view("<u2")[:, :dim].astype(np.float64))
