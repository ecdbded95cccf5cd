"""Selection of the training rows that are held out for testing: at random, by a column, or the latest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.primitives.splitmix64 import next_of

MAX_SAMPLED = 1 << 20  # times that are kept in memory to find the last training row

SplitValues = npt.NDArray[np.int64] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """The rule that divides rows into training rows and test rows.

    Attributes:
        by: ``data.split``.
        seed: the seed of the run.
        fraction: the fraction of rows that is held out.
        latest: with ``by = "time"``, the time of the last training row, estimated from a random sample if
            there are more than ``MAX_SAMPLED`` rows.
    """

    by: str
    seed: int
    fraction: float
    latest: float = 0.0

    @classmethod
    def of(
        cls, config: RunConfig, blocks: Iterable[tuple[npt.NDArray[np.int64], SplitValues | None]]
    ) -> Split:
        """Return the split of a configuration.

        Args:
            blocks: row numbers and values of ``data.split_column``; read only for a split by time.
        """
        data = config.data
        fraction = 0.0 if data.test_path else data.test_fraction
        split = cls(data.split_call.name, config.run.seed, fraction)
        if not split.is_by_time:
            return split
        times, hashes, limit = np.empty(0), np.empty(0, np.uint64), 2**64 - 1
        for rows_B, times_B in blocks:
            assert times_B is not None
            times = np.append(times, times_B)
            hashes = np.append(hashes, split._hash(rows_B))
            keep = hashes <= np.uint64(limit)
            while keep.sum() > MAX_SAMPLED:
                limit //= 2
                keep = hashes <= np.uint64(limit)
            times, hashes = times[keep], hashes[keep]
        latest = float(np.quantile(times, 1 - fraction, method="inverted_cdf")) if len(times) else 0.0
        return replace(split, latest=latest)

    @property
    def is_by_time(self) -> bool:
        """Whether the latest rows are held out."""
        return self.by == "time" and self.fraction > 0

    def is_test(self, rows_B: npt.NDArray[np.int64], values_B: SplitValues | None) -> npt.NDArray[np.bool_]:
        """Select the test rows of a block.

        Args:
            rows_B: numbers of the rows in the input.
            values_B: the values of ``data.split_column``; None if the split is random.
        """
        if self.is_by_time:
            assert values_B is not None
            is_later: npt.NDArray[np.bool_] = values_B > self.latest
            return is_later
        is_below: npt.NDArray[np.bool_] = self._hash(
            rows_B if values_B is None or self.by == "random" else values_B
        ) < np.uint64(self.fraction * 2**64)
        return is_below

    def _hash(self, values_B: SplitValues) -> npt.NDArray[np.uint64]:
        key = next_of(np.array([self.seed % 2**64], np.uint64))
        return next_of(values_B.astype(np.int64).view(np.uint64) ^ key)
