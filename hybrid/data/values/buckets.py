"""Numbers in buckets: bucket i holds what is at least bound i and below bound i + 1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_KEPT = 1 << 20


class Quantiles:
    """The quantiles of a column that is given block by block, in bounded memory.

    Numbers are kept as they are up to ``MAX_KEPT`` of them, and quantiles of these are exact. Beyond that,
    those kept are replaced by half as many, evenly spread over their ranks, each standing for equally many.
    Each such replacement moves a rank by at most half the distance of two that are left: after N numbers, all
    of them together by a share of N / (4 * (MAX_KEPT / 2) ** 2) at most, a thousandth for a billion.
    """

    def __init__(self) -> None:
        self._values = np.empty(0)
        self._weights = np.empty(0)

    def add(self, numbers: npt.NDArray[np.float64]) -> None:
        """Add numbers, none of which is NaN."""
        for start in range(0, len(numbers), MAX_KEPT // 2):
            part = numbers[start : start + MAX_KEPT // 2]
            self._values = np.concatenate([self._values, part])
            self._weights = np.concatenate([self._weights, np.ones(len(part))])
            if len(self._values) > MAX_KEPT:
                self._halve()

    def bounds(self, buckets: int) -> tuple[float, ...]:
        """Where buckets of equally many numbers begin, the lowest aside; fewer where numbers are alike."""
        if not len(self._values):
            return ()
        values, ends = self._sorted()
        ranks = ends[-1] * np.arange(1, buckets) / buckets
        found = np.unique(values[np.searchsorted(ends, ranks, side="right")])
        return tuple(found[found > values[0]].tolist())

    def _sorted(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The values that are kept, rising, and of how many numbers each is the last."""
        order = np.argsort(self._values, kind="stable")
        return self._values[order], np.cumsum(self._weights[order])

    def _halve(self) -> None:
        values, ends = self._sorted()
        half = MAX_KEPT // 2
        step = ends[-1] / half
        at = np.searchsorted(ends, (np.arange(half) + 0.5) * step, side="right")
        self._values = values[np.minimum(at, len(values) - 1)]
        self._weights = np.full(half, step)


def bucket_of(numbers_B: npt.NDArray[np.float64], bounds: tuple[float, ...]) -> npt.NDArray[np.int32]:
    """The row of a table for each number: 1 + its bucket; 0 for NaN, which is missing."""
    rows_B = 1 + np.searchsorted(np.array(bounds), numbers_B, side="right")
    return np.where(np.isnan(numbers_B), 0, rows_B).astype(np.int32)
