"""Values to numbers: vocabularies, hashing and scaling, fitted on the training rows alone.

Row 0 of every table is for missing values and for those unknown at training time.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.config import DataSection
from hybrid.data.canonical import stable_hash
from hybrid.data.columns import MAX_NUMBER, is_list
from hybrid.data.layout import Layout
from hybrid.data.sources import RawBlock
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec, InputSpec

FILE_NAME = "features.json"
FORMAT_VERSION = 2
_TRANSFORMS = ("none", "log")


class Bags(NamedTuple):
    """The ids of one multi-hot feature for B samples: int32 (L,), and int64 (B,) ids of each sample."""

    ids_L: npt.NDArray[np.int32]
    lengths_B: npt.NDArray[np.int64]


class EncodedBlock(NamedTuple):
    """B samples as numbers.

    Attributes:
        dense_BF: float32.
        ids_BK: int32, one column for each feature of one id a sample, in their order.
        bags: one for each multi-hot feature, in their order.
    """

    dense_BF: npt.NDArray[np.float32]
    ids_BK: npt.NDArray[np.int32]
    bags: tuple[Bags, ...] = ()


@dataclass(frozen=True)
class DenseEncoding:
    """How one numeric column is scaled: (x - mean) / deviation, after the transform."""

    name: str
    mean: float = 0.0
    deviation: float = 1.0

    def is_right(self) -> bool:
        """Whether it can be one, which comes out of a file."""
        numbers = (self.mean, self.deviation)
        are_numbers = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        return isinstance(self.name, str) and are_numbers and self.deviation > 0


@dataclass(frozen=True)
class SparseEncoding:
    """How the values of one categorical column become rows of its table.

    Attributes:
        name: column name.
        vocabulary: "build" (row 1 + place in ``values``), "hash", or "identity" (values are rows already).
        num_rows: rows of the table, row 0 included.
        multi_hot: whether a sample may hold any number of values; otherwise several count as unknown.
        values: known values by falling frequency (vocabulary "build"), in canonical texts.
        expected_unknown: share of unknown values in rows like the training rows; see hybrid/data/unknown.py.
    """

    name: str
    vocabulary: str
    num_rows: int
    multi_hot: bool = False
    values: tuple[str, ...] = ()
    expected_unknown: float = 0.0

    def is_right(self) -> bool:
        """Whether it can be one, which comes out of a file."""
        if type(self.num_rows) is not int or not all(isinstance(value, str) for value in self.values):
            return False
        fewest = {"build": 1 + len(self.values), "hash": 2, "identity": 1}.get(self.vocabulary, 1 << 31)
        return (
            isinstance(self.name, str)
            and type(self.multi_hot) is bool
            and type(self.expected_unknown) in (int, float)
            and fewest <= self.num_rows <= np.iinfo(np.int32).max
        )

    def rows(self, values: Sequence[str | None]) -> list[int]:
        """The row of each of ``values``; 0 where it is unknown, or None."""
        if self.vocabulary == "build":
            known = self._rows
            return [known.get(value, 0) for value in values]
        if self.vocabulary == "hash":
            return [0 if v is None else 1 + stable_hash(v) % (self.num_rows - 1) for v in values]
        return [int(v) if v and v.isdecimal() and int(v) < self.num_rows else 0 for v in values]

    @cached_property
    def _rows(self) -> dict[str | None, int]:
        return {value: row for row, value in enumerate(self.values, start=1)}

    def encode(self, column: Any) -> npt.NDArray[np.int32] | Bags:
        """Rows of a column as in ``RawBlock``."""
        if not is_list(column):
            if not self.multi_hot:
                return self._encode_flat(column)
            given_B = np.asarray(column.is_valid())
            return Bags(self._encode_flat(column)[given_B], given_B.astype(np.int64))
        ids_L = self._encode_flat(column.flatten())
        lengths_B = np.diff(np.asarray(column.offsets)).astype(np.int64)
        if self.multi_hot:
            return Bags(ids_L, lengths_B)
        ids_B = np.zeros(len(lengths_B), np.int32)
        ids_B[lengths_B == 1] = ids_L[np.repeat(lengths_B == 1, lengths_B)]
        return ids_B

    def _encode_flat(self, coded: Any) -> npt.NDArray[np.int32]:
        rows = np.array([*self.rows(coded.dictionary.to_pylist()), 0], np.int32)
        return rows.take(np.asarray(coded.indices.fill_null(len(rows) - 1)))


@dataclass(frozen=True)
class FeatureEncoder:
    """Turns parsed rows into numbers, the same way for training, evaluation and prediction.

    Attributes:
        numeric_transform: "none", or "log" for sign(x) * log(1 + |x|).
        dense, sparse: one encoding a column, in the order of the tensors of a batch.
    """

    numeric_transform: str
    dense: tuple[DenseEncoding, ...]
    sparse: tuple[SparseEncoding, ...]

    @classmethod
    def fit(cls, blocks: Iterable[RawBlock], data: DataSection) -> FeatureEncoder:
        """Learn vocabularies, means and deviations from the training rows.

        Memory grows with the number of distinct values (vocabulary = build), not of rows.

        Raises:
            DataError: there are no rows.
        """
        data = Layout.of(data, with_labels=False).data  # where its format names the columns, with these
        moments = _Moments(len(data.dense))
        counters = [_ValueCounter() for _ in data.sparse]
        for block in blocks:
            moments.add(_transform(block.dense_BF, data.numeric_transform))
            for counter, column in zip(counters, block.sparse, strict=True):
                counter.add(column, data.vocabulary == "build")
        if not moments.num_rows:
            raise DataError("no row is left to train on; check data.path and data.test_fraction")
        scales = moments.scales() if data.standardise else [(0.0, 1.0)] * len(data.dense)
        dense = tuple(DenseEncoding(n, *s) for n, s in zip(data.dense, scales, strict=True))
        sparse = tuple(c.encoding(n, data) for n, c in zip(data.sparse, counters, strict=True))
        return cls(data.numeric_transform, dense, sparse)

    @classmethod
    def of_rows(cls, spec: InputSpec) -> FeatureEncoder:
        """For batches that hold numbers as they are, and rows of tables as ids: it changes neither."""
        dense = tuple(map(DenseEncoding, spec.dense_features))
        features = spec.sparse_features
        sparse = tuple(SparseEncoding(f.name, "identity", f.num_rows, f.multi_hot) for f in features)
        return cls("none", dense, sparse)

    @property
    def input_spec(self) -> InputSpec:
        """The columns that ``encode`` gives."""
        features = (FeatureSpec(s.name, s.num_rows, s.multi_hot) for s in self.sparse)
        return InputSpec(tuple(d.name for d in self.dense), tuple(features))

    def encode(self, block: RawBlock) -> EncodedBlock:
        """Numbers of the rows of ``block``; a missing number becomes 0, the mean of a scaled column."""
        mean_F = np.array([d.mean for d in self.dense])
        deviation_F = np.array([d.deviation for d in self.dense])
        dense_BF = (_transform(block.dense_BF, self.numeric_transform) - mean_F) / deviation_F
        np.nan_to_num(dense_BF, copy=False, nan=0.0)
        coded = [s.encode(column) for s, column in zip(self.sparse, block.sparse, strict=True)]
        ids_BK = np.empty((len(dense_BF), sum(not s.multi_hot for s in self.sparse)), np.int32)
        one_id = (ids for ids in coded if not isinstance(ids, Bags))
        for k, ids_B in enumerate(one_id):
            ids_BK[:, k] = ids_B
        bags = tuple(ids for ids in coded if isinstance(ids, Bags))
        return EncodedBlock(np.clip(dense_BF, -MAX_NUMBER, MAX_NUMBER).astype(np.float32), ids_BK, bags)

    @property
    def text(self) -> str:
        """What ``features.json`` holds."""
        return json.dumps({"format": FORMAT_VERSION, **asdict(self)}, ensure_ascii=False)

    def save(self, folder: Path) -> None:
        """Write ``features.json`` into ``folder``."""
        (folder / FILE_NAME).write_text(self.text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> FeatureEncoder:
        """Read what ``save`` wrote; DataError where it is not there or of another version."""
        path = folder / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT_VERSION:
            raise DataError(f"{path}: format {found!r}, this version reads {FORMAT_VERSION}")
        try:
            dense = tuple(DenseEncoding(**d) for d in content["dense"])
            sparse = tuple(SparseEncoding(**{**s, "values": tuple(s["values"])}) for s in content["sparse"])
            is_right = all(d.is_right() for d in dense) and all(s.is_right() for s in sparse)
        except (TypeError, KeyError) as error:
            raise DataError(f"{path}: does not say how columns become numbers ({error!r})") from error
        if not is_right or content["numeric_transform"] not in _TRANSFORMS:
            raise DataError(f"{path}: does not say how columns become numbers")
        return cls(content["numeric_transform"], dense, sparse)


class _ValueCounter:
    """Counts the values of one categorical column."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._multi_hot = False

    def add(self, column: Any, count_values: bool) -> None:
        if is_list(column):
            self._multi_hot |= bool((np.diff(np.asarray(column.offsets)) > 1).any())
            column = column.flatten()
        if count_values:
            counts_D = np.bincount(column.indices.drop_null(), minlength=len(column.dictionary))
            for value, count in zip(column.dictionary.to_pylist(), counts_D.tolist(), strict=True):
                if count:
                    self._counts[value] += count

    def encoding(self, name: str, data: DataSection) -> SparseEncoding:
        if data.vocabulary == "hash":
            return SparseEncoding(name, "hash", data.hash_rows, self._multi_hot)
        minimum = data.vocabulary_min_count
        values = tuple(v for _, v in sorted((-n, v) for v, n in self._counts.items() if n >= minimum))
        known_by_itself = sum(n for n in self._counts.values() if n <= minimum)
        expected_unknown = known_by_itself / max(1, self._counts.total())
        return SparseEncoding(name, "build", 1 + len(values), self._multi_hot, values, expected_unknown)


class _Moments:
    """Mean and deviation of columns given block by block, NaN left out (Chan, Golub and LeVeque, 1979)."""

    def __init__(self, num_columns: int) -> None:
        self.num_rows = 0
        self._count_F = np.zeros(num_columns)
        self._mean_F = np.zeros(num_columns)
        self._squares_F = np.zeros(num_columns)

    def add(self, dense_BF: npt.NDArray[np.float64]) -> None:
        self.num_rows += len(dense_BF)
        given_BF = ~np.isnan(dense_BF)
        count_F = given_BF.sum(0)
        total_F = np.maximum(self._count_F + count_F, 1)
        mean_F = np.where(given_BF, dense_BF, 0.0).sum(0) / np.maximum(count_F, 1)
        squares_F = (np.where(given_BF, dense_BF - mean_F, 0.0) ** 2).sum(0)
        delta_F = mean_F - self._mean_F
        self._squares_F += squares_F + delta_F**2 * self._count_F * count_F / total_F
        self._mean_F += delta_F * count_F / total_F
        self._count_F += count_F

    def scales(self) -> list[tuple[float, float]]:
        """Mean and deviation of each column; a constant column counts as deviating by its own size."""
        deviation_F = np.sqrt(self._squares_F / np.maximum(self._count_F, 1))
        size_F = np.abs(self._mean_F)
        constant_F = deviation_F <= 1e-12 * size_F
        deviation_F[constant_F] = np.maximum(size_F[constant_F], 1.0)
        return list(zip(self._mean_F.tolist(), deviation_F.tolist(), strict=True))


def _transform(dense_BF: npt.NDArray[np.float64], transform: str) -> npt.NDArray[np.float64]:
    if transform == "log":
        return np.sign(dense_BF) * np.log1p(np.abs(dense_BF))
    return dense_BF
