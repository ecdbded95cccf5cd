"""Encodings of categorical columns: values to rows of a table.

Row 0 of every table is for missing values and for values unknown at training time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.data.encode.vocabulary import NO_VALUES, Vocabulary
from hybrid.data.values.canonical import stable_hashes
from hybrid.data.values.column_values import is_list
from hybrid.data.values.scaling import bucket_of


class EncodedBags(NamedTuple):
    """The ids of a multi-hot feature of B samples.

    Attributes:
        ids_L: int32, of all samples.
        lengths_B: int64, the number of ids of each sample.
        weights_L: float32, if the ids have weights.
    """

    ids_L: npt.NDArray[np.int32]
    lengths_B: npt.NDArray[np.int64]
    weights_L: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class SparseEncoding:
    """The encoding of a categorical column.

    Attributes:
        name: of the column.
        vocabulary: "build" (row 1 + index in ``values``), "hash", "identity" (values are rows), or "buckets"
            (row 1 + bucket of a number).
        num_rows: rows of the table, row 0 included.
        multi_hot: whether a sample may hold any number of values; otherwise several count as unknown.
        values: known values by falling frequency (vocabulary "build"), in canonical texts.
        expected_unknown: fraction of unknown values in rows like the training rows; see unknown_values.py.
        bounds: the lower bound of each bucket but the lowest.
        weighted: whether its ids have weights; it is multi-hot then.
    """

    name: str
    vocabulary: str
    num_rows: int
    multi_hot: bool = False
    values: Vocabulary = NO_VALUES
    expected_unknown: float = 0.0
    bounds: tuple[float, ...] = ()
    weighted: bool = False

    def is_valid(self) -> bool:
        """Return whether values that come from a file make an encoding."""
        if type(self.num_rows) is not int:
            return False
        if not all(type(bound) is float and math.isfinite(bound) for bound in self.bounds):
            return False
        minima = {"build": 1 + len(self.values), "hash": 2, "identity": 1, "buckets": 2 + len(self.bounds)}
        return (
            isinstance(self.name, str)
            and all(low < high for low, high in pairwise(self.bounds))
            and type(self.multi_hot) is bool
            and type(self.weighted) is bool
            and (self.multi_hot or not self.weighted)
            and type(self.expected_unknown) in (int, float)
            and minima.get(self.vocabulary, 1 << 31) <= self.num_rows <= np.iinfo(np.int32).max
        )

    @property
    def fields(self) -> dict[str, Any]:
        """All attributes but the values, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "values"}

    def rows(self, values: pa.Array) -> npt.NDArray[np.int32]:
        """Return the row of each of an array of texts; 0 if it is unknown, or null."""
        if self.vocabulary == "build":
            return (1 + self.values.indices(values)).astype(np.int32)
        last = self.num_rows - 1
        if self.vocabulary == "hash":
            rows = 1 + (stable_hashes(values) % np.uint64(last)).astype(np.int32)
            return np.where(np.asarray(values.is_valid()), rows, np.int32(0))
        texts = values.to_pylist()
        return np.array([int(v) if v and v.isdecimal() and int(v) <= last else 0 for v in texts], np.int32)

    def encode(self, column: pa.Array) -> npt.NDArray[np.int32] | EncodedBags:
        """Return the rows of a column of a ``RawBlock``, or of one whose values are rows already."""
        if self.vocabulary == "buckets":
            return bucket_of(column.to_numpy(zero_copy_only=False), self.bounds)
        if not is_list(column):
            if not self.multi_hot:
                return self._encode_flat(column)
            given_B = np.asarray(column.is_valid())
            return EncodedBags(self._encode_flat(column)[given_B], given_B.astype(np.int64))
        ids_L = self._encode_flat(column.flatten())
        lengths_B = np.diff(np.asarray(column.offsets)).astype(np.int64)
        if self.multi_hot:
            return EncodedBags(ids_L, lengths_B)
        ids_B = np.zeros(len(lengths_B), np.int32)
        ids_B[lengths_B == 1] = ids_L[np.repeat(lengths_B == 1, lengths_B)]
        return ids_B

    def _encode_flat(self, coded: pa.DictionaryArray) -> npt.NDArray[np.int32]:
        values = coded.dictionary
        rows_D = values if pa.types.is_integer(values.type) else self.rows(values)
        rows = np.append(np.asarray(rows_D, np.int32), np.int32(0))
        return rows.take(np.asarray(coded.indices.fill_null(len(rows) - 1)))
