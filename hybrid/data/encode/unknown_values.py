"""Categorical values that the training rows do not have: how many there are, and how many to expect.

New rows always have some. How many follows from the training rows: without one of them, its value is unknown
if fewer other rows have it than a vocabulary requires (Good, 1953). If new rows have far more, they are other
data, or their values are written differently. Rows that are later than all training rows are not like them:
new users and items appear with time, so nothing is expected of them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid.data.encode.feature_encoder import EncodedBlock, FeatureEncoder
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.column_values import is_list

EXCESS = 0.1
MIN_COUNT = 10


@dataclass(frozen=True, slots=True)
class UnknownValues:
    """The unknown values of one categorical column of a split.

    Attributes:
        name: of the column.
        count: number of unknown values; 0 with ``vocabulary = hash``.
        num_values: number of values, missing ones excluded.
        expected: the fraction that is unknown in rows like the training rows; None for later rows.
    """

    name: str
    count: int
    num_values: int
    expected: float | None

    @property
    def fraction(self) -> float:
        """The unknown fraction of the values that are not missing."""
        return self.count / max(1, self.num_values)

    @property
    def is_excessive(self) -> bool:
        """Whether the fraction exceeds the expected one by more than a tenth, and not by a few values."""
        if self.expected is None:
            return False
        return self.count >= MIN_COUNT and self.fraction > self.expected + EXCESS


class UnknownCounter:
    """Counts the unknown values of a split, block by block.

    Args:
        is_later: whether the rows of the split are later than the training rows.
    """

    def __init__(self, encoder: FeatureEncoder, *, is_later: bool = False) -> None:
        self._encoder = encoder
        self._is_later = is_later
        self._counts_K = np.zeros(len(encoder.sparse), np.int64)
        self._values_K = np.zeros(len(encoder.sparse), np.int64)

    def add(self, block: RawBlock, encoded: EncodedBlock) -> None:
        """Add rows, and their result of ``FeatureEncoder.encode``."""
        one_id, bags = iter(encoded.ids_BK.T), iter(encoded.bags)
        for k, (encoding, column) in enumerate(zip(self._encoder.sparse, block.sparse, strict=True)):
            ids = next(bags).ids_L if encoding.multi_hot else next(one_id)
            absent = 0
            if not encoding.multi_hot:
                absent = int((np.diff(column.offsets) == 0).sum()) if is_list(column) else column.null_count
            self._counts_K[k] += (ids == 0).sum() - absent  # a missing value has row 0, too
            self._values_K[k] += len(ids) - absent

    @property
    def counted(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The number of unknown values, and of all values, of each column."""
        return self._counts_K, self._values_K

    def add_counts(self, counts_K: npt.NDArray[np.int64], values_K: npt.NDArray[np.int64]) -> None:
        """Add the counts of another counter."""
        self._counts_K += counts_K
        self._values_K += values_K

    def report(self) -> tuple[UnknownValues, ...]:
        """Return the counts by column."""
        counted = zip(self._encoder.sparse, self._counts_K.tolist(), self._values_K.tolist(), strict=True)
        return tuple(
            UnknownValues(e.name, count, n, None if self._is_later else e.expected_unknown)
            for e, count, n in counted
        )
