"""Random initial rows of tables."""

import zlib

import numpy as np
import torch
from torch import Tensor

from hybrid.primitives.splitmix64 import splitmix64

_BLOCK_VALUES = 1 << 20


def initialise_rows(
    out_RD: Tensor,
    seed: int,
    table: str,
    scale: float,
    index: int = 0,
    count: int = 1,
    init: str = "uniform",
) -> None:
    """Fill the rows ``index``, ``index + count``, ... of a table with their initial values.

    Each value is uniform in [-scale, scale], normal with standard deviation ``scale``, or zero, as ``init``
    says. It is a pure function of seed, table name, row and column (SplitMix64 as a counter; Steele et al.
    2014), so that every placement has the same table, and each worker computes only its own rows.
    """
    if init == "zeros":
        out_RD.zero_()
        return
    num_rows, dim = out_RD.shape
    key = np.uint64((seed * 0x9E3779B97F4A7C15 + zlib.crc32(table.encode()) * 0xD1B54A32D192ED03) % 2**64)
    block = max(1, _BLOCK_VALUES // dim)
    columns_D = np.arange(dim, dtype=np.uint64)
    for start in range(0, num_rows, block):
        stop = min(start + block, num_rows)
        rows = np.arange(start, stop, dtype=np.uint64) * np.uint64(count) + np.uint64(index)
        counter_RD = rows[:, None] * np.uint64(dim) + columns_D
        uniform_RD = (splitmix64(counter_RD + key) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        if init == "normal":  # by the inverse distribution function: one draw per value
            normal_RD = torch.special.ndtri(torch.from_numpy(uniform_RD).double() + 2**-25)
            out_RD[start:stop] = normal_RD * scale
        else:
            out_RD[start:stop] = torch.from_numpy((uniform_RD * 2 - 1) * np.float32(scale))
