"""The encoder of a model: rows to numbers, by vocabularies, hashes, buckets and scaling.

In tables of fixed size, row 0 is for values unknown at training time, and for missing values of columns with
one value per row. Bucket 0 holds the numbers below ``bounds[0]``. Bucket i holds the numbers from
``bounds[i - 1]`` up to, but not including, ``bounds[i]``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.checkpoint.checkpoint_folders import VOCABULARIES_FILE
from hybrid.config.data_sections import GROW, TRANSFORMS
from hybrid.data.encode.vocabulary_file import find_vocabularies, open_vocabularies, write_vocabularies
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.canonical import compute_keys, hash_texts
from hybrid.data.values.column_values import MAX_NUMBER, is_list, take_or_default
from hybrid.data.values.model_columns import Targets
from hybrid.data.values.vocabulary import Vocabulary
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.storage.file_formats import parse_fields, parse_json
from hybrid.storage.files import compute_checksum, read_text, write_bytes
from hybrid.storage.remote_path import StoragePath

FILE_NAME = "features.json"
FORMAT_VERSION = 4
# Unknown values are excessive if they exceed the expected fraction by _EXCESS, and are at least _MIN_UNKNOWN.
_EXCESS, _MIN_UNKNOWN = 0.1, 10

Ids: TypeAlias = npt.NDArray[np.signedinteger[Any]]  # int32, or int64 if some ids are keys


@dataclass(frozen=True)
class DenseEncoding:
    """The scaling of a numeric column."""

    name: str
    # shift, scale: the scaled value of a number x is (transform(x) - shift) / scale.
    shift: float = 0.0
    scale: float = 1.0
    # The scaled value of a missing number: the scaled mean (training or given), or 0 without scaling.
    missing: float = 0.0
    transform: str = "none"  # "none", or "log" for sign(x) * log(1 + |x|)


class EncodedBags(NamedTuple):
    """The ids of a multi-hot feature of B samples."""

    ids_L: Ids  # the ids of all samples; int64 for keys
    offsets: npt.NDArray[np.int64]  # (B + 1,): where the ids of each sample start, and where the last end
    weights_L: npt.NDArray[np.float32] | None = None  # if the ids have weights

    def take(self, rows: npt.NDArray[np.int64]) -> EncodedBags:
        """Return the bags of some samples, in the order of their indices ``rows``."""
        positions_L, lengths_B = item_positions(self.offsets, rows)
        weights_L = None if self.weights_L is None else self.weights_L[positions_L]
        return EncodedBags(self.ids_L[positions_L], np.append(0, lengths_B.cumsum()), weights_L)


def item_positions(
    offsets: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions of the items of some bags, bag by bag, and the lengths of these bags.

    ``offsets`` are the start position of every bag, and the end of the last. ``rows`` are the bags to select.
    """
    starts_B = offsets[rows]
    lengths_B = offsets[rows + 1] - starts_B
    before_B = np.cumsum(lengths_B) - lengths_B
    return np.repeat(starts_B - before_B, lengths_B) + np.arange(lengths_B.sum()), lengths_B


@dataclass(frozen=True)
class SparseEncoding:
    """The conversion of the values of a categorical column to table rows, or to keys of a growing table."""

    name: str
    # "build" (row 1 + index in ``values``), "hash", "identity" (values are rows), "buckets" (row 1 + bucket
    # of a number), or "grow" (keys instead of rows; see compute_keys).
    vocabulary: str
    num_rows: int  # rows of the table, row 0 included; 0 for a growing table
    # Whether a sample may hold any number of values; otherwise, several values count as an unknown value.
    multi_hot: bool = False
    # For vocabulary "build", the canonical texts of the known values, by falling frequency.
    values: Vocabulary | None = None
    expected_unknown: float = 0.0  # unknown fraction in rows like the training rows; see UnknownValues
    bounds: tuple[float, ...] = ()  # the lower bound of each bucket except the lowest
    weighted: bool = False  # whether the ids have weights; such a feature is multi-hot

    @property
    def is_growing(self) -> bool:
        return self.vocabulary == GROW

    def rows(self, values: pa.Array) -> Ids:
        """Return the table row of each text, 0 for null and unknown texts; keys if the table grows."""
        if self.is_growing:
            return compute_keys(values)
        if self.values is not None:
            return (1 + self.values.indices(values)).astype(np.int32)
        last = self.num_rows - 1
        if self.vocabulary == "hash":
            rows = 1 + (hash_texts(values) % np.uint64(last)).astype(np.int32)
            return np.where(np.asarray(values.is_valid()), rows, np.int32(0))
        texts = values.to_pylist()
        return np.array([int(v) if v and v.isdecimal() and int(v) <= last else 0 for v in texts], np.int32)

    def encode(self, column: pa.Array) -> Ids | EncodedBags:
        """Return the table rows, or keys, of a column of a ``RawBlock``; bags for a multi-hot column.

        Integers in the column are rows or keys already, and stay unchanged. If the column is not multi-hot, a
        sample without a value, or with several values, gets row or key 0.
        """
        if self.vocabulary == "buckets":
            numbers_B = column.to_numpy(zero_copy_only=False)
            rows_B = 1 + np.searchsorted(np.array(self.bounds), numbers_B, side="right")
            return np.where(np.isnan(numbers_B), 0, rows_B).astype(np.int32)
        if not is_list(column):
            is_encoded = pa.types.is_integer(column.type)
            ids_B: Ids = np.asarray(column.fill_null(0)) if is_encoded else self._encode_flat(column)
            if not self.multi_hot:
                return ids_B
            given_B = np.asarray(column.is_valid())
            return EncodedBags(ids_B[given_B], np.append(0, np.cumsum(given_B)))
        ids_L = self._encode_flat(column.flatten())
        offsets = np.asarray(column.offsets).astype(np.int64)
        if self.multi_hot:
            return EncodedBags(ids_L, offsets - offsets[0])
        lengths_B = np.diff(offsets)
        ids_B = np.zeros(len(lengths_B), ids_L.dtype)
        ids_B[lengths_B == 1] = ids_L[np.repeat(lengths_B == 1, lengths_B)]
        return ids_B

    def _encode_flat(self, coded: pa.DictionaryArray) -> Ids:
        values = coded.dictionary
        rows_D = values if pa.types.is_integer(values.type) else self.rows(values)
        dtype = np.int64 if self.is_growing else np.int32
        return take_or_default(np.asarray(rows_D, dtype), coded.indices, 0)


@dataclass(frozen=True, slots=True)
class UnknownValues:
    """The number of values that the encoder does not know, in a categorical column of a split.

    The expected fraction is a leave-one-out estimate (Good, 1953): the fraction of training rows whose value
    would be unknown if the vocabulary came from all other rows. A far larger fraction means that the new rows
    are from different data, or spell values differently. Rows later than all training rows have no expected
    fraction, because new users and items appear with time.
    """

    name: str
    count: int  # number of unknown values; with vocabulary hash or grow, equal to ``several``
    num_values: int  # number of values, missing ones excluded
    expected: float | None  # expected unknown fraction in rows like the training rows; None for later rows
    # Number of rows with several values in a column of one value per row; they count as unknown.
    several: int = 0

    @property
    def fraction(self) -> float:
        """The unknown fraction of the values that are not missing."""
        return self.count / max(1, self.num_values)

    @property
    def is_excessive(self) -> bool:
        """Whether at least 10 values are unknown, and ``fraction`` is more than 0.1 above ``expected``."""
        has_many = self.count >= _MIN_UNKNOWN
        return has_many and self.expected is not None and self.fraction > self.expected + _EXCESS


class EncodedBlock(NamedTuple):
    """B samples as numbers. For a prepared split, the arrays are mapped into memory."""

    dense_BF: npt.NDArray[np.float32]
    # One column for each feature with one id per sample, in the order of features; int64 if one has keys.
    ids_BK: Ids
    bags: tuple[EncodedBags, ...] = ()  # one for each multi-hot feature, in the order of features
    targets: Targets | None = None  # labels, weights and groups, or None

    @property
    def size(self) -> int:
        return len(self.dense_BF)

    def take(self, rows: npt.NDArray[np.int64]) -> EncodedBlock:
        """Return some samples, in the order of their indices ``rows``."""
        return EncodedBlock(
            self.dense_BF.take(rows, axis=0),
            self.ids_BK.take(rows, axis=0),
            tuple(bag.take(rows) for bag in self.bags),
            None if self.targets is None else self.targets.select(rows),
        )


@dataclass(frozen=True)
class FeatureEncoder:
    """The encoder of parsed rows, for training, evaluation and prediction."""

    # dense, sparse: one encoding for each column, in the order of the tensors of a batch.
    dense: tuple[DenseEncoding, ...]
    sparse: tuple[SparseEncoding, ...]

    @classmethod
    def identity(cls, spec: InputSpec) -> FeatureEncoder:
        """Return an encoder that keeps numbers, ids and keys, for a model that is trained on tensors."""
        dense = tuple(map(DenseEncoding, spec.dense_features))
        sparse = []
        for f in spec.sparse_features:
            kind, multi_hot = "identity" if f.num_rows else GROW, f.multi_hot or f.weighted
            sparse.append(SparseEncoding(f.name, kind, f.num_rows, multi_hot, weighted=f.weighted))
        return cls(dense, tuple(sparse))

    @property
    def input_spec(self) -> InputSpec:
        """The names of the columns, and the sizes of their tables."""
        features = (FeatureSpec(s.name, s.num_rows, s.multi_hot, s.weighted) for s in self.sparse)
        return InputSpec(tuple(d.name for d in self.dense), tuple(features))

    def encode(self, block: RawBlock) -> EncodedBlock:
        """Encode parsed rows. Scaled numbers beyond the range of float32 are cut to it."""
        shift_F = np.array([each.shift for each in self.dense])
        scale_F = np.array([each.scale for each in self.dense])
        missing_F = np.array([each.missing for each in self.dense])
        transforms = [each.transform for each in self.dense]
        scaled_BF = (transform_columns(block.dense_BF, transforms) - shift_F) / scale_F
        scaled_BF = np.where(np.isnan(scaled_BF), missing_F, scaled_BF)
        dense_BF = np.clip(scaled_BF, -MAX_NUMBER, MAX_NUMBER).astype(np.float32)
        weights = iter(block.weights)
        one_id: list[Ids] = []
        bags: list[EncodedBags] = []
        for each, column in zip(self.sparse, block.sparse, strict=True):
            ids = each.encode(column)
            if isinstance(ids, EncodedBags):
                weights_L = np.asarray(next(weights).flatten()) if each.weighted else None
                bags.append(ids._replace(weights_L=weights_L))
            else:
                one_id.append(ids)
        ids_BK: Ids = np.stack(one_id, axis=1) if one_id else np.empty((len(dense_BF), 0), np.int32)
        return EncodedBlock(dense_BF, ids_BK, tuple(bags), block.targets)

    @property
    def vocabularies(self) -> list[Vocabulary]:
        """The distinct vocabularies of the columns."""
        distinct: list[Vocabulary] = []
        for each in self.sparse:
            if each.values is not None and each.values not in distinct:
                distinct.append(each.values)
        return distinct

    def save(self, folder: Path) -> None:
        """Write ``features.json`` and ``vocabularies.parquet`` into ``folder``."""
        write_vocabularies(folder / VOCABULARIES_FILE, self.vocabularies)
        text = self.to_json(compute_checksum(folder / VOCABULARIES_FILE))
        write_bytes(folder / FILE_NAME, text.encode())

    def to_json(self, sha256: str | None = None) -> str:
        """Return the content of ``features.json``; ``sha256`` is the checksum of the vocabularies, if any."""
        vocabularies = self.vocabularies
        sparse = []
        for each in self.sparse:
            index = None if each.values is None else vocabularies.index(each.values)
            sparse.append({**asdict(replace(each, values=None)), "values": index})
        dense = [asdict(each) for each in self.dense]
        content = {"format": FORMAT_VERSION, "dense": dense, "sparse": sparse, "vocabularies": sha256}
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def load(cls, folder: StoragePath, *, with_values: bool = True) -> FeatureEncoder:
        """Load the encoder that ``save`` wrote; DataError if it is missing, invalid or of another version.

        If ``with_values`` is false, vocabularies are not read, and all ``SparseEncoding.values`` are None.
        Otherwise, raise StorageError if a store or the system refuses access to the vocabularies.
        """
        path = folder / FILE_NAME
        content = _read_json(path)
        if content.get("format") != FORMAT_VERSION:
            raise DataError(f"{path}: format {content.get('format')!r}, this version reads {FORMAT_VERSION}")
        try:
            sha256, known = content.get("vocabularies"), list[Vocabulary]()
            if with_values and sha256 is not None:
                with open_vocabularies(folder, sha256) as file:
                    known = file.read_all()
            dense = tuple(parse_fields(DenseEncoding, d) for d in content["dense"])
            sparse = tuple(_sparse_encoding(s, known if with_values else None) for s in content["sparse"])
            is_finite = all(math.isfinite(n) for d in dense for n in (d.shift, d.scale, d.missing))
            is_scale = all(each.scale > 0 and each.transform in TRANSFORMS for each in dense)
            if not is_finite or not is_scale:
                raise TypeError("a value is invalid")
        except (TypeError, AttributeError, KeyError, IndexError) as error:
            raise DataError(f"{path}: does not define the encoding of columns ({error!r})") from error
        return cls(dense, sparse)


@contextmanager
def open_values(folder: StoragePath, column: str) -> Iterator[Iterator[pa.LargeStringArray]]:
    """Open the values in the vocabulary of a column, as blocks of texts; value i has table row i + 1.

    Raise the errors of :func:`open_vocabularies`, and DataError if ``features.json`` cannot be read.
    """
    content = _read_json(folder / FILE_NAME)
    index = next(each["values"] for each in content["sparse"] if each["name"] == column)
    with open_vocabularies(folder, content["vocabularies"]) as file:
        yield file.blocks(index)


def transform_columns(
    dense_BF: npt.NDArray[np.float64], transforms: Sequence[str]
) -> npt.NDArray[np.float64]:
    is_log_F = np.array([transform == "log" for transform in transforms], np.bool_)
    if not is_log_F.any():
        return dense_BF
    return np.where(is_log_F, np.sign(dense_BF) * np.log1p(np.abs(dense_BF)), dense_BF)


def count_unknown(encoder: FeatureEncoder, block: RawBlock, encoded: EncodedBlock) -> npt.NDArray[np.int64]:
    """Count three fields of :class:`UnknownValues` (count, num_values, several) in a block, (3, columns)."""
    counts: npt.NDArray[np.int64] = np.zeros((3, len(encoder.sparse)), np.int64)
    one_id, bags = iter(encoded.ids_BK.T), iter(encoded.bags)
    for k, (encoding, column) in enumerate(zip(encoder.sparse, block.sparse, strict=True)):
        ids = next(bags).ids_L if encoding.multi_hot else next(one_id)
        absent = several = 0
        if not encoding.multi_hot:
            lengths_B = np.diff(column.offsets) if is_list(column) else np.asarray(column.is_valid())
            absent, several = (lengths_B == 0).sum(), (lengths_B > 1).sum()
        unknown = several if encoding.is_growing else (ids == 0).sum() - absent  # a missing value has row 0
        counts[:, k] = unknown, len(ids) - absent, several
    return counts


def report_unknown(
    encoder: FeatureEncoder, counts: npt.NDArray[np.int64], *, is_later: bool = False
) -> tuple[UnknownValues, ...]:
    """Return a report for each column of a split; ``counts`` is the sum of :func:`count_unknown` over blocks.

    Only workers know the keys of a growing table. So the report of its column counts only rows with several
    values, and is absent without such rows. ``is_later``: whether rows are later than the training rows.
    """
    return tuple(
        UnknownValues(each.name, count, num_values, None if is_later else each.expected_unknown, several)
        for each, count, num_values, several in zip(encoder.sparse, *counts.tolist(), strict=True)
        if several or not each.is_growing
    )


def vocabulary_files(folder: StoragePath) -> dict[str, StoragePath]:
    """Return the vocabulary file of an encoder as {"SHA256.parquet": path}; {} if the encoder has none.

    Raise the errors of :func:`find_vocabularies`, and DataError if ``features.json`` cannot be read.
    """
    sha256 = _read_json(folder / FILE_NAME).get("vocabularies")
    return {} if sha256 is None else {f"{sha256}.parquet": find_vocabularies(folder, sha256)}


def _read_json(path: StoragePath) -> dict[str, Any]:
    """Return the JSON object in a file, {} for any other JSON value; DataError if it cannot be read."""
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    return content if isinstance(content, dict) else {}


def _sparse_encoding(content: Any, known: Sequence[Vocabulary] | None) -> SparseEncoding:
    index = content.pop("values")
    if index is not None and (type(index) is not int or index < 0):
        raise TypeError("values must be the index of a vocabulary")
    encoding: SparseEncoding = parse_fields(SparseEncoding, content)
    if (index is None) == (encoding.vocabulary == "build"):
        raise TypeError("vocabulary build has values, and no other has")
    if index is not None and known is not None:
        encoding = replace(encoding, values=known[index])
    num_values = len(encoding.values or ())
    minima = {"build": 1 + num_values, "hash": 2, "identity": 1, "buckets": 2 + len(encoding.bounds), GROW: 0}
    is_valid = (
        minima.get(encoding.vocabulary, 1 << 31) <= encoding.num_rows <= np.iinfo(np.int32).max
        and encoding.is_growing == (encoding.num_rows == 0)
        and all(map(math.isfinite, encoding.bounds))
        and all(low < high for low, high in pairwise(encoding.bounds))
        and (encoding.multi_hot or not encoding.weighted)
    )
    if not is_valid:
        raise TypeError("a value is invalid")
    return encoding
