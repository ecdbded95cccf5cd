"""Which rows of the training files are held out for testing: by chance, by a column, or the latest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.data.sources import RawBlock, Source
from hybrid.splitmix64 import next_of

MAX_SAMPLED = 1 << 20  # times that are held to find the first of the test rows

# Which of the rows of a block are for testing.
IsTest: TypeAlias = Callable[[RawBlock], npt.NDArray[np.bool_]]


def split_of(config: RunConfig, source: Source) -> IsTest:
    """How the rows of ``source`` are split; for ``data.split = "time"``, they are read once for that."""
    data, key = config.data, _key(config.run.seed)
    fraction = 0.0 if data.test_path else data.test_fraction
    if data.split == "time" and fraction:
        latest = _quantile(source, key, 1 - fraction)
        return lambda block: _split_values(block) > latest

    def is_test(block: RawBlock) -> npt.NDArray[np.bool_]:
        values_B = block.source_rows_B if data.split == "random" else _split_values(block).astype(np.int64)
        is_below: npt.NDArray[np.bool_] = _hashed(values_B, key) < np.uint64(fraction * 2**64)
        return is_below

    return is_test


def _split_values(block: RawBlock) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    assert block.split_B is not None, "it is read where data.split wants it"
    return block.split_B


def _quantile(source: Source, key: npt.NDArray[np.uint64], share: float) -> float:
    """The time that a share of the rows is not later than, of a sample of them where there are very many."""
    times, hashes, limit = np.empty(0), np.empty(0, np.uint64), 2**64 - 1
    for block in source.blocks():
        times = np.append(times, _split_values(block))
        hashes = np.append(hashes, _hashed(block.source_rows_B, key))
        keep = hashes <= np.uint64(limit)
        while keep.sum() > MAX_SAMPLED:
            limit //= 2
            keep = hashes <= np.uint64(limit)
        times, hashes = times[keep], hashes[keep]
    return float(np.quantile(times, share, method="inverted_cdf")) if len(times) else 0.0


def _hashed(
    values_B: npt.NDArray[np.int64] | npt.NDArray[np.float64], key: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    return next_of(values_B.astype(np.int64).view(np.uint64) ^ key)


def _key(seed: int) -> npt.NDArray[np.uint64]:
    return next_of(np.array([seed % 2**64], np.uint64))
