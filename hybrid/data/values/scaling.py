"""Scaling of numbers: a transform, then (x - shift) / scale, fitted on the training rows."""

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


class BlockMoments(NamedTuple):
    """Mean, deviation and range of F transformed columns of some rows, without NaN."""

    num_rows: int
    count_F: npt.NDArray[np.int64]
    mean_F: npt.NDArray[np.float64]
    squares_F: npt.NDArray[np.float64]
    lowest_F: npt.NDArray[np.float64]
    highest_F: npt.NDArray[np.float64]

    @classmethod
    def of(cls, dense_BF: npt.NDArray[np.float64], transforms: Sequence[str]) -> BlockMoments:
        """Compute the moments of B rows of numbers as the files hold them."""
        dense_BF = transformed(dense_BF, transforms)
        given_BF = ~np.isnan(dense_BF)
        count_F = given_BF.sum(0)
        mean_F = np.where(given_BF, dense_BF, 0.0).sum(0) / np.maximum(count_F, 1)
        squares_F = (np.where(given_BF, dense_BF - mean_F, 0.0) ** 2).sum(0)
        lowest_F = np.fmin.reduce(dense_BF, initial=np.inf)
        highest_F = np.fmax.reduce(dense_BF, initial=-np.inf)
        return cls(len(dense_BF), count_F, mean_F, squares_F, lowest_F, highest_F)


class Moments:
    """Mean, deviation and range of columns that come block by block, without NaN (Chan et al., 1979)."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.num_rows = 0
        self._columns = columns
        self._count_F = np.zeros(len(columns))
        self._mean_F = np.zeros(len(columns))
        self._squares_F = np.zeros(len(columns))
        self._lowest_F = np.full(len(columns), np.inf)
        self._highest_F = np.full(len(columns), -np.inf)

    def add(self, block: BlockMoments) -> None:
        """Add the moments of further rows."""
        self.num_rows += block.num_rows
        total_F = np.maximum(self._count_F + block.count_F, 1)
        delta_F = block.mean_F - self._mean_F
        self._squares_F += block.squares_F + delta_F**2 * self._count_F * block.count_F / total_F
        self._mean_F += delta_F * block.count_F / total_F
        self._count_F += block.count_F
        self._lowest_F = np.minimum(self._lowest_F, block.lowest_F)
        self._highest_F = np.maximum(self._highest_F, block.highest_F)

    def encodings(self) -> tuple[DenseEncoding, ...]:
        """Return the scaling of each column; a constant column becomes zeros."""
        deviation_F = np.sqrt(self._squares_F / np.maximum(self._count_F, 1))
        size_F = np.abs(self._mean_F)
        constant_F = deviation_F <= 1e-12 * size_F
        deviation_F[constant_F] = np.maximum(size_F[constant_F], 1.0)
        return tuple(self._encoding(f, float(deviation_F[f])) for f in range(len(self._columns)))

    def _encoding(self, f: int, deviation: float) -> DenseEncoding:
        column, mean = self._columns[f], float(self._mean_F[f])
        lowest, highest = float(self._lowest_F[f]), float(self._highest_F[f])
        if column.scaling == "none":
            return DenseEncoding(column.name, transform=column.transform)
        if column.scaling == "standardize":
            return DenseEncoding(column.name, mean, deviation, transform=column.transform)
        if not lowest < highest:  # constant, or there is no number
            shift = lowest if lowest == highest else 0.0
            return DenseEncoding(column.name, shift, transform=column.transform)
        scale = highest - lowest
        return DenseEncoding(column.name, lowest, scale, (mean - lowest) / scale, column.transform)
