"""Buckets of numbers: bucket i holds numbers from bound i up to, but not including, bound i + 1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_KEPT = 1 << 20


class Quantiles:
    """The quantiles of a column that comes block by block, in bounded memory.

    Up to ``MAX_KEPT`` numbers are kept, and their quantiles are exact. Beyond that, half as many replace
    them, evenly spread over their ranks, each of the same weight. Each replacement moves a rank by at most
    half the distance of two that are left. After N numbers, all replacements together move a rank by a
    fraction of at most N / (4 * (MAX_KEPT / 2) ** 2), a thousandth for a billion numbers.
    """

    def __init__(self) -> None:
        self._values = np.empty(0)
        self._weights = np.empty(0)

    def add(self, numbers: npt.NDArray[np.float64]) -> None:
        """Add numbers, none of which is NaN."""
        for start in range(0, len(numbers), MAX_KEPT // 2):
            block = numbers[start : start + MAX_KEPT // 2]
            self._values = np.concatenate([self._values, block])
            self._weights = np.concatenate([self._weights, np.ones(len(block))])
            if len(self._values) > MAX_KEPT:
                values, ends = self._sort()
                half = MAX_KEPT // 2
                step = ends[-1] / half
                index = np.searchsorted(ends, (np.arange(half) + 0.5) * step, side="right")
                self._values = values[np.minimum(index, len(values) - 1)]
                self._weights = np.full(half, step)

    def bounds(self, buckets: int) -> tuple[float, ...]:
        """Return the lower bounds of equally full buckets but the lowest; fewer if numbers are alike."""
        if not len(self._values):
            return ()
        values, ends = self._sort()
        ranks = ends[-1] * np.arange(1, buckets) / buckets
        bounds = np.unique(values[np.searchsorted(ends, ranks, side="right")])
        return tuple(bounds[bounds > values[0]].tolist())

    def _sort(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the kept values, rising, and the sum of the weights up to each."""
        order = np.argsort(self._values, kind="stable")
        return self._values[order], np.cumsum(self._weights[order])


def bucket_of(numbers_B: npt.NDArray[np.float64], bounds: tuple[float, ...]) -> npt.NDArray[np.int32]:
    """Return the table row of each number: 1 + its bucket; 0 for NaN, which is missing."""
    rows_B = 1 + np.searchsorted(np.array(bounds), numbers_B, side="right")
    return np.where(np.isnan(numbers_B), 0, rows_B).astype(np.int32)
