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


def count_unknown(encoder: FeatureEncoder, block: RawBlock, encoded: EncodedBlock) -> npt.NDArray[np.int64]:
    """Return the numbers of unknown values and of all values of K categorical columns of a block, (2, K).

    Args:
        encoded: the result of ``FeatureEncoder.encode``.
    """
    counts: npt.NDArray[np.int64] = np.zeros((2, len(encoder.sparse)), np.int64)
    one_id, bags = iter(encoded.ids_BK.T), iter(encoded.bags)
    for k, (encoding, column) in enumerate(zip(encoder.sparse, block.sparse, strict=True)):
        ids = next(bags).ids_L if encoding.multi_hot else next(one_id)
        absent = 0
        if not encoding.multi_hot:
            absent = int((np.diff(column.offsets) == 0).sum()) if is_list(column) else column.null_count
        counts[:, k] = (ids == 0).sum() - absent, len(ids) - absent  # a missing value has row 0, too
    return counts


def report_unknown(
    encoder: FeatureEncoder, counts: npt.NDArray[np.int64], *, is_later: bool = False
) -> tuple[UnknownValues, ...]:
    """Return the unknown values of a split by column.

    Args:
        counts: the sum of :func:`count_unknown` over all blocks.
        is_later: whether the rows of the split are later than the training rows.
    """
    return tuple(
        UnknownValues(each.name, count, num_values, None if is_later else each.expected_unknown)
        for each, count, num_values in zip(encoder.sparse, *counts.tolist(), strict=True)
    )
