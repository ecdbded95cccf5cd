"""Values to numbers: vocabularies, hashing and scaling, fitted on the training rows alone.

Row 0 of every table is for missing values and for those unknown at training time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.checkpoint.checkpoint_folders import vocabulary_path
from hybrid.config import ColumnSection, DataSection, TableSection
from hybrid.data.encode.fitting import (
    FittedStatistics,
    RankedValues,
    ValueCounts,
    bucketed_numbers,
    holds_several,
    other_encoding,
    rank,
    value_encoding,
    vocabularies,
)
from hybrid.data.encode.sparse_encoding import Bags, SparseEncoding
from hybrid.data.encode.vocabulary import NO_VALUES, Vocabulary
from hybrid.data.encode.vocabulary_file import VOCABULARIES_FILE, read_vocabularies, write_vocabularies
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.scaling import BlockMoments, DenseEncoding, scaled
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.storage.files import compute_checksum, exists, read_text
from hybrid.storage.remote_path import StoragePath

FILE_NAME = "features.json"
FORMAT_VERSION = 4
_WITH_VALUES = 3


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
class FeatureEncoder:
    """Turns parsed rows into numbers, the same way for training, evaluation and prediction.

    Attributes:
        dense, sparse: one encoding a column, in the order of the tensors of a batch.
    """

    dense: tuple[DenseEncoding, ...]
    sparse: tuple[SparseEncoding, ...]

    @classmethod
    def fit(
        cls,
        blocks: Iterable[RawBlock],
        data: DataSection,
        columns: Mapping[str, ColumnSection] = MappingProxyType({}),
        tables: Mapping[str, TableSection] = MappingProxyType({}),
    ) -> FeatureEncoder:
        """Learn vocabularies, scales and the bounds of buckets from the training rows.

        Memory grows with the number of distinct values (vocabulary = build), not of rows.

        Args:
            tables: say which columns share one, and with it their vocabulary.

        Raises:
            DataError: there are no rows.
        """
        layout = Layout.of(data, columns, with_labels=False)
        learnt = FittedStatistics.of(layout)
        words: dict[str, list[ValueCounts]] = {}
        for block in blocks:
            learnt.moments.add(BlockMoments.of(block.dense_BF, layout.transforms))
            for k, column in enumerate(block.sparse):
                learnt.several_K[k] |= holds_several(column)
                learnt.quantiles_K[k].add(bucketed_numbers(layout.sparse[k], column))
            for name, group in vocabularies(layout.sparse, tables).items():
                words.setdefault(name, []).extend(ValueCounts.of(block.sparse[k]) for k in group)
        found = {name: rank(parts)[0] for name, parts in words.items()}
        return cls.of_statistics(layout, tables, learnt, found)

    @classmethod
    def of_statistics(
        cls,
        layout: Layout,
        tables: Mapping[str, TableSection],
        learnt: FittedStatistics,
        words: Mapping[str, RankedValues],
    ) -> FeatureEncoder:
        """What was learnt of the training rows, as an encoder.

        Args:
            words: those of each vocabulary (:func:`hybrid.data.encode.fitting.vocabularies`).

        Raises:
            DataError: there are no rows.
        """
        if not learnt.moments.num_rows:
            raise DataError("no row is left to train on; check data.path and data.test_fraction")
        found = {k: words[name] for name, group in vocabularies(layout.sparse, tables).items() for k in group}
        sparse = tuple(
            value_encoding(column, found[k], multi_hot=bool(learnt.several_K[k]))
            if k in found
            else other_encoding(column, learnt.quantiles_K[k], multi_hot=bool(learnt.several_K[k]))
            for k, column in enumerate(layout.sparse)
        )
        return cls(learnt.moments.encodings(), sparse)

    @classmethod
    def of_rows(cls, spec: InputSpec, weighted: Collection[str] = ()) -> FeatureEncoder:
        """For batches that hold numbers as they are, and rows of tables as ids: it changes neither.

        Args:
            weighted: the features whose ids had weights, whatever ``spec`` says of them.
        """
        dense = tuple(map(DenseEncoding, spec.dense_features))
        sparse = []
        for feature in spec.sparse_features:
            has_weights = feature.weighted or feature.name in weighted
            is_bag = feature.multi_hot or has_weights
            encoding = SparseEncoding(
                feature.name, "identity", feature.num_rows, is_bag, weighted=has_weights
            )
            sparse.append(encoding)
        return cls(dense, tuple(sparse))

    @property
    def input_spec(self) -> InputSpec:
        """The columns that ``encode`` gives."""
        features = (FeatureSpec(s.name, s.num_rows, s.multi_hot, s.weighted) for s in self.sparse)
        return InputSpec(tuple(d.name for d in self.dense), tuple(features))

    def encode(self, block: RawBlock) -> EncodedBlock:
        """Numbers of the rows of ``block``."""
        dense_BF = scaled(block.dense_BF, self.dense)
        weights = iter(block.weights)
        coded: list[npt.NDArray[np.int32] | Bags] = []
        for each, column in zip(self.sparse, block.sparse, strict=True):
            ids = each.encode(column)
            if each.weighted and isinstance(ids, Bags):
                ids = ids._replace(weights_L=np.asarray(next(weights).flatten()))
            coded.append(ids)
        ids_BK = np.empty((len(dense_BF), sum(not s.multi_hot for s in self.sparse)), np.int32)
        one_id = (ids for ids in coded if not isinstance(ids, Bags))
        for k, ids_B in enumerate(one_id):
            ids_BK[:, k] = ids_B
        bags = tuple(ids for ids in coded if isinstance(ids, Bags))
        return EncodedBlock(dense_BF, ids_BK, bags)

    @property
    def text(self) -> str:
        """What ``features.json`` holds in a folder that has no file of vocabularies."""
        sparse = [{**each.fields, "values": each.values.texts.to_pylist()} for each in self.sparse]
        return _text(_WITH_VALUES, self.dense, sparse, {})

    def save(self, folder: Path) -> None:
        """Write ``features.json`` into ``folder``, and the vocabularies beside it."""
        distinct: list[Vocabulary] = []
        sparse = []
        for each in self.sparse:
            if each.vocabulary == "build" and each.values not in distinct:
                distinct.append(each.values)
            place = distinct.index(each.values) if each.vocabulary == "build" else None
            sparse.append({**each.fields, "values": place})
        write_vocabularies(folder / VOCABULARIES_FILE, distinct)
        sha256 = compute_checksum(folder / VOCABULARIES_FILE)
        text = _text(FORMAT_VERSION, self.dense, sparse, {"vocabularies": sha256})
        (folder / FILE_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: StoragePath) -> FeatureEncoder:
        """What ``save`` wrote, or ``text`` gave; DataError where it is not there or of another version."""
        path = folder / FILE_NAME
        try:
            content = json.loads(read_text(path))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
        found = content.get("format") if isinstance(content, dict) else None
        if found not in (_WITH_VALUES, FORMAT_VERSION):
            raise DataError(
                f"{path}: format {found!r}, this version reads {_WITH_VALUES} and {FORMAT_VERSION}"
            )
        try:
            vocabularies = None
            if found == FORMAT_VERSION:
                vocabularies = _vocabularies(folder, content["vocabularies"])
            dense = tuple(DenseEncoding(**d) for d in content["dense"])
            sparse = tuple(_sparse_encoding(s, vocabularies) for s in content["sparse"])
            is_right = all(d.is_right() for d in dense) and all(s.is_right() for s in sparse)
        except (TypeError, KeyError, IndexError, pa.ArrowException) as error:
            raise DataError(f"{path}: does not say how columns become numbers ({error!r})") from error
        if not is_right:
            raise DataError(f"{path}: does not say how columns become numbers")
        return cls(dense, sparse)


def vocabularies_of(folder: Path) -> dict[str, Path]:
    """The file of the vocabularies of prepared data, by the name that a run keeps it under."""
    content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    return {_kept_name(content["vocabularies"]): folder / VOCABULARIES_FILE}


def vocabularies_place(folder: StoragePath) -> StoragePath | None:
    """Where the vocabularies are of prepared data or of a checkpoint; None where they are in features.json.

    Raises:
        DataError: they are nowhere.
    """
    path = folder / FILE_NAME
    try:
        sha256 = json.loads(read_text(path)).get("vocabularies")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    return None if sha256 is None else _found(folder, sha256)


def _vocabularies(folder: StoragePath, sha256: Any) -> list[Vocabulary]:
    return read_vocabularies(_found(folder, sha256), sha256)


def _found(folder: StoragePath, sha256: Any) -> StoragePath:
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise TypeError("vocabularies must be a checksum")
    beside, kept = folder / VOCABULARIES_FILE, vocabulary_path(folder.absolute(), _kept_name(sha256))
    for place in (beside, kept):
        if exists(place):
            return place
    rule = f"copy {_kept_name(sha256)} there out of the folder vocabularies of the run that it is from"
    raise DataError(f"{beside}: the vocabularies are neither here nor in {kept.parent}; {rule}")


def _kept_name(sha256: str) -> str:
    return f"{sha256}.parquet"


def _text(
    version: int, dense: Iterable[DenseEncoding], sparse: list[dict[str, Any]], more: dict[str, str]
) -> str:
    content = {"format": version, "dense": [asdict(each) for each in dense], "sparse": sparse, **more}
    return json.dumps(content, ensure_ascii=False)


def _sparse_encoding(content: Any, known: Sequence[Vocabulary] | None) -> SparseEncoding:
    """Out of JSON.

    Args:
        known: vocabularies, of which its values are one by their place; None where it has the values itself.
    """
    given = content["values"]
    if known is None:
        if not all(type(value) is str for value in given):
            raise TypeError("a value is no text")
        values = Vocabulary.of(given)
    else:
        if given is not None and (type(given) is not int or given < 0):
            raise TypeError("values must be the place of a vocabulary")
        values = NO_VALUES if given is None else known[given]
    return SparseEncoding(**{**content, "values": values, "bounds": tuple(content["bounds"])})
