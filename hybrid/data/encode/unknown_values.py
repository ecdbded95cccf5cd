"""Categorical values that the training rows did not have: how many there are, and how many to expect.

Some are always to be expected in new rows. How many follows from the training rows themselves: leave a row
out, and its value is unknown where no more than ``vocabulary_min_count`` - 1 others have it (Good, 1953).
Where new rows have far more, they are from elsewhere, or their values are written otherwise.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid.data.encode.feature_encoder import EncodedBlock, FeatureEncoder
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.column_values import is_list

FAR = 0.1
MIN_FAR = 10


@dataclass(frozen=True, slots=True)
class UnknownValues:
    """Those of one categorical column of a split.

    Attributes:
        name: of the column.
        count: how many values are unknown; with ``vocabulary = hash``, none is.
        num_values: how many there are, missing ones left out.
        expected: the share that new rows like the training rows would have.
    """

    name: str
    count: int
    num_values: int
    expected: float

    @property
    def share(self) -> float:
        """Of the values that are not missing."""
        return self.count / max(1, self.num_values)

    @property
    def is_far(self) -> bool:
        """Whether the share is above what was expected by a tenth of all values, and not of a handful."""
        return self.count >= MIN_FAR and self.share > self.expected + FAR


class UnknownCounter:
    """Counts the unknown values of a split, block by block."""

    def __init__(self, encoder: FeatureEncoder) -> None:
        self._encoder = encoder
        self._counts_K = np.zeros(len(encoder.sparse), np.int64)
        self._values_K = np.zeros(len(encoder.sparse), np.int64)

    def add(self, block: RawBlock, encoded: EncodedBlock) -> None:
        """Add rows, and what ``FeatureEncoder.encode`` makes of them."""
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
        """How many values of each column are unknown, and how many there are."""
        return self._counts_K, self._values_K

    def add_counted(self, counts_K: npt.NDArray[np.int64], values_K: npt.NDArray[np.int64]) -> None:
        """Add what another one has counted."""
        self._counts_K += counts_K
        self._values_K += values_K

    def report(self) -> tuple[UnknownValues, ...]:
        """What was counted, by column."""
        counted = zip(self._encoder.sparse, self._counts_K.tolist(), self._values_K.tolist(), strict=True)
        return tuple(UnknownValues(e.name, count, n, e.expected_unknown) for e, count, n in counted)
