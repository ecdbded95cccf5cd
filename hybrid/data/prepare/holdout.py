"""Which rows of the training files are held out for testing: by chance, by a column, or the latest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.data.parse.sources import RawBlock
from hybrid.primitives.splitmix64 import next_of

MAX_SAMPLED = 1 << 20  # times that are held to find the first of the test rows


@dataclass(frozen=True)
class Split:
    """How rows are split.

    Attributes:
        by: as data.split says.
        seed: of the run.
        fraction: of the rows that are held out.
        latest: with ``by = "time"``, the time of the last training row.
    """

    by: str
    seed: int
    fraction: float
    latest: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, blocks: Iterable[RawBlock]) -> Split:
        """How the rows of ``blocks`` are split; these are looked at only where they are split by time."""
        data = config.data
        fraction = 0.0 if data.test_path else data.test_fraction
        split = cls(data.split, config.run.seed, fraction)
        if split.is_by_time:
            return cls(data.split, config.run.seed, fraction, split._quantile(blocks, 1 - fraction))
        return split

    @property
    def is_by_time(self) -> bool:
        """Whether any rows are held out for being the latest."""
        return self.by == "time" and self.fraction > 0

    def is_test(self, block: RawBlock) -> npt.NDArray[np.bool_]:
        """Which rows of a block are for testing."""
        if self.is_by_time:
            is_later: npt.NDArray[np.bool_] = _split_values(block) > self.latest
            return is_later
        values_B = block.source_rows_B if self.by == "random" else _split_values(block).astype(np.int64)
        is_below: npt.NDArray[np.bool_] = self._hashed(values_B) < np.uint64(self.fraction * 2**64)
        return is_below

    def _quantile(self, blocks: Iterable[RawBlock], share: float) -> float:
        """The time that a share of the rows is not later than, of a sample where there are very many."""
        times, hashes, limit = np.empty(0), np.empty(0, np.uint64), 2**64 - 1
        for block in blocks:
            times = np.append(times, _split_values(block))
            hashes = np.append(hashes, self._hashed(block.source_rows_B))
            keep = hashes <= np.uint64(limit)
            while keep.sum() > MAX_SAMPLED:
                limit //= 2
                keep = hashes <= np.uint64(limit)
            times, hashes = times[keep], hashes[keep]
        return float(np.quantile(times, share, method="inverted_cdf")) if len(times) else 0.0

    def _hashed(self, values_B: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
        key = next_of(np.array([self.seed % 2**64], np.uint64))
        return next_of(values_B.astype(np.int64).view(np.uint64) ^ key)


def _split_values(block: RawBlock) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    assert block.split_B is not None, "it is read where data.split wants it"
    return block.split_B
