"""Selection of the training rows that are held out: at random, by a column, or the latest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid.config.splits import Holdout
from hybrid.data.parse.sources import RawBlock, SplitValues
from hybrid.primitives.splitmix64 import next_of

MAX_SAMPLED = 1 << 20  # times that are kept in memory to find the last training row


@dataclass(frozen=True)
class Split:
    """The rule that selects the rows of a split.

    Attributes:
        held: the split, and its keys in the configuration.
        seed: the seed of random rows, and of sampled times.
        latest: with ``held.by = "time"``, the time of the last row that is not held out, estimated from a
            random sample if there are more than ``MAX_SAMPLED`` rows.
    """

    held: Holdout
    seed: int
    latest: float = 0.0

    def find_latest(self, blocks: Iterable[RawBlock]) -> float:
        """Return the time of the last row of ``blocks`` that this split does not hold out."""
        times, hashes, limit = np.empty(0), np.empty(0, np.uint64), 2**64 - 1
        for block in blocks:
            times = np.append(times, block.held_out_by[self.held.split])
            hashes = np.append(hashes, self._hash(block.source_rows_B))
            keep = hashes <= np.uint64(limit)
            while keep.sum() > MAX_SAMPLED:
                limit //= 2
                keep = hashes <= np.uint64(limit)
            times, hashes = times[keep], hashes[keep]
        fraction = 1 - self.held.fraction
        return float(np.quantile(times, fraction, method="inverted_cdf")) if len(times) else 0.0

    def selects(self, block: RawBlock) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows of a block that belong to the split."""
        if self.held.by == "time":
            is_later: npt.NDArray[np.bool_] = block.held_out_by[self.held.split] > self.latest
            return is_later
        is_random = self.held.by == "random"
        hashed_B = self._hash(block.source_rows_B if is_random else block.held_out_by[self.held.split])
        is_below: npt.NDArray[np.bool_] = hashed_B < np.uint64(self.held.fraction * 2**64)
        return is_below

    def _hash(self, values_B: SplitValues) -> npt.NDArray[np.uint64]:
        key = next_of(np.array([self.seed % 2**64], np.uint64))
        return next_of(values_B.astype(np.int64).view(np.uint64) ^ key)
