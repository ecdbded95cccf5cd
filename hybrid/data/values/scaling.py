"""Scaling of numbers (a transform, then (x - shift) / scale) and buckets of numbers.

Bucket i holds numbers from bound i up to, but not including, bound i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.config.data_sections import TRANSFORMS
from hybrid.config.resolved_columns import Column
from hybrid.data.values.column_values import MAX_NUMBER

MAX_KEPT = 1 << 20


@dataclass(frozen=True)
class DenseEncoding:
    """The scaling of a numeric column.

    Attributes:
        name: of the column.
        shift, scale: subtracted from the transformed numbers, and dividing the difference.
        missing: the scaled value of a missing number, that of the training mean; 0 without scaling.
        transform: "none", or "log" for sign(x) * log(1 + |x|).
    """

    name: str
    shift: float = 0.0
    scale: float = 1.0
    missing: float = 0.0
    transform: str = "none"

    def is_valid(self) -> bool:
        """Return whether values that come from a file make an encoding."""
        numbers = (self.shift, self.scale, self.missing)
        are_numbers = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        return isinstance(self.name, str) and are_numbers and self.scale > 0 and self.transform in TRANSFORMS


def scaled(dense_BF: npt.NDArray[np.float64], encodings: Sequence[DenseEncoding]) -> npt.NDArray[np.float32]:
    """Scale the numbers of B rows; NaN means missing."""
    shift_F = np.array([each.shift for each in encodings])
    scale_F = np.array([each.scale for each in encodings])
    missing_F = np.array([each.missing for each in encodings])
    scaled_BF = (transformed(dense_BF, [each.transform for each in encodings]) - shift_F) / scale_F
    scaled_BF = np.where(np.isnan(scaled_BF), missing_F, scaled_BF)
    return np.clip(scaled_BF, -MAX_NUMBER, MAX_NUMBER).astype(np.float32)


def transformed(dense_BF: npt.NDArray[np.float64], transforms: Sequence[str]) -> npt.NDArray[np.float64]:
    """Transform columns."""
    is_log_F = np.array([transform == "log" for transform in transforms], np.bool_)
    if not is_log_F.any():
        return dense_BF
    return np.where(is_log_F, np.sign(dense_BF) * np.log1p(np.abs(dense_BF)), dense_BF)


class Moments(NamedTuple):
    """Mean, deviation and range of F transformed columns of some rows, without NaN."""

    num_rows: int
    count_F: npt.NDArray[np.int64]
    mean_F: npt.NDArray[np.float64]
    squares_F: npt.NDArray[np.float64]
    lowest_F: npt.NDArray[np.float64]
    highest_F: npt.NDArray[np.float64]

    @classmethod
    def of(cls, dense_BF: npt.NDArray[np.float64], transforms: Sequence[str]) -> Moments:
        """Compute the moments of B rows of numbers as the files hold them."""
        dense_BF = transformed(dense_BF, transforms)
        given_BF = ~np.isnan(dense_BF)
        count_F = given_BF.sum(0)
        mean_F = np.where(given_BF, dense_BF, 0.0).sum(0) / np.maximum(count_F, 1)
        squares_F = (np.where(given_BF, dense_BF - mean_F, 0.0) ** 2).sum(0)
        lowest_F = np.fmin.reduce(dense_BF, initial=np.inf)
        highest_F = np.fmax.reduce(dense_BF, initial=-np.inf)
        return cls(len(dense_BF), count_F, mean_F, squares_F, lowest_F, highest_F)

    def plus(self, block: Moments) -> Moments:
        """Return the moments of these rows and of further ones (Chan et al., 1979)."""
        total_F = np.maximum(self.count_F + block.count_F, 1)
        delta_F = block.mean_F - self.mean_F
        return Moments(
            self.num_rows + block.num_rows,
            self.count_F + block.count_F,
            self.mean_F + delta_F * block.count_F / total_F,
            self.squares_F + (block.squares_F + delta_F**2 * self.count_F * block.count_F / total_F),
            np.minimum(self.lowest_F, block.lowest_F),
            np.maximum(self.highest_F, block.highest_F),
        )

    def encodings(self, columns: Sequence[Column]) -> tuple[DenseEncoding, ...]:
        """Return the scaling of each column; a constant column becomes zeros."""
        deviation_F = np.sqrt(self.squares_F / np.maximum(self.count_F, 1))
        size_F = np.abs(self.mean_F)
        constant_F = deviation_F <= 1e-12 * size_F
        deviation_F[constant_F] = np.maximum(size_F[constant_F], 1.0)
        encodings = []
        values = (each.tolist() for each in (self.mean_F, deviation_F, self.lowest_F, self.highest_F))
        for column, mean, deviation, lowest, highest in zip(columns, *values, strict=True):
            shift, scale, missing = 0.0, 1.0, 0.0
            if column.scaling == "standardize":
                shift, scale = mean, deviation
            elif column.scaling == "min_max" and lowest < highest:
                shift, scale = lowest, highest - lowest
                missing = (mean - lowest) / scale
            elif column.scaling == "min_max" and lowest == highest:  # constant
                shift = lowest
            encodings.append(DenseEncoding(column.name, shift, scale, missing, column.transform))
        return tuple(encodings)


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
