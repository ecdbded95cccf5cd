"""The encoder of a model: rows to numbers, by vocabularies, hashing and scaling fitted on the training rows.

Row 0 of every table is for missing values and for values unknown at training time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.checkpoint.checkpoint_folders import vocabulary_path
from hybrid.config import TableSection
from hybrid.data.encode.fitting import FittedStatistics, RankedValues, fitted_encoding, vocabularies
from hybrid.data.encode.sparse_encoding import EncodedBags, SparseEncoding
from hybrid.data.encode.vocabulary import (
    NO_VALUES,
    VOCABULARIES_FILE,
    Vocabulary,
    read_vocabularies,
    write_vocabularies,
)
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.scaling import DenseEncoding, scaled
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.storage.files import compute_checksum, exists, read_text
from hybrid.storage.remote_path import StoragePath

FILE_NAME = "features.json"
FORMAT_VERSION = 4
_WITH_VALUES = 3  # the format that holds vocabularies itself


class EncodedBlock(NamedTuple):
    """B samples as numbers.

    Attributes:
        dense_BF: float32.
        ids_BK: int32, one column for each feature of one id a sample, in their order.
        bags: one for each multi-hot feature, in their order.
    """

    dense_BF: npt.NDArray[np.float32]
    ids_BK: npt.NDArray[np.int32]
    bags: tuple[EncodedBags, ...] = ()


@dataclass(frozen=True)
class FeatureEncoder:
    """Encodes parsed rows, the same way for training, evaluation and prediction.

    Attributes:
        dense, sparse: one encoding for each column, in the order of the tensors of a batch.
    """

    dense: tuple[DenseEncoding, ...]
    sparse: tuple[SparseEncoding, ...]

    @classmethod
    def of_statistics(
        cls,
        layout: Layout,
        tables: Mapping[str, TableSection],
        statistics: FittedStatistics,
        ranked: Mapping[str, RankedValues],
    ) -> FeatureEncoder:
        """Return the encoder of fitted statistics.

        Args:
            ranked: the values of each vocabulary (:func:`hybrid.data.encode.fitting.vocabularies`).

        Raises:
            DataError: there are no rows.
        """
        if not statistics.moments.num_rows:
            raise DataError("no row is left to train on; check data.path and data.test_fraction")
        of_column = {k: ranked[name] for name, ks in vocabularies(layout.sparse, tables).items() for k in ks}
        sparse = tuple(
            fitted_encoding(column, of_column.get(k), statistics.quantiles_K[k], multi_hot=bool(several))
            for k, (column, several) in enumerate(zip(layout.sparse, statistics.several_K, strict=True))
        )
        return cls(statistics.moments.encodings(layout.dense), sparse)

    @classmethod
    def of_rows(cls, spec: InputSpec, weighted: Collection[str] = ()) -> FeatureEncoder:
        """Return an encoder that changes neither numbers nor ids, of a model that was trained on batches.

        Args:
            weighted: further features whose ids had weights.
        """
        dense = tuple(map(DenseEncoding, spec.dense_features))
        sparse = []
        for feature in spec.sparse_features:
            has_weights = feature.weighted or feature.name in weighted
            is_bag = feature.multi_hot or has_weights
            sparse.append(
                SparseEncoding(feature.name, "identity", feature.num_rows, is_bag, weighted=has_weights)
            )
        return cls(dense, tuple(sparse))

    @property
    def input_spec(self) -> InputSpec:
        """The columns of :meth:`encode`."""
        features = (FeatureSpec(s.name, s.num_rows, s.multi_hot, s.weighted) for s in self.sparse)
        return InputSpec(tuple(d.name for d in self.dense), tuple(features))

    def encode(self, block: RawBlock) -> EncodedBlock:
        """Encode the rows of a block."""
        dense_BF = scaled(block.dense_BF, self.dense)
        weights = iter(block.weights)
        one_id: list[npt.NDArray[np.int32]] = []
        bags: list[EncodedBags] = []
        for each, column in zip(self.sparse, block.sparse, strict=True):
            ids = each.encode(column)
            if not isinstance(ids, EncodedBags):
                one_id.append(ids)
            elif each.weighted:
                bags.append(ids._replace(weights_L=np.asarray(next(weights).flatten())))
            else:
                bags.append(ids)
        ids_BK = np.empty((len(dense_BF), len(one_id)), np.int32)
        for k, ids_B in enumerate(one_id):
            ids_BK[:, k] = ids_B
        return EncodedBlock(dense_BF, ids_BK, tuple(bags))

    @property
    def text(self) -> str:
        """The content of ``features.json`` in a folder without a file of vocabularies."""
        sparse = [{**each.fields, "values": each.values.texts.to_pylist()} for each in self.sparse]
        return self._to_json(_WITH_VALUES, sparse, {})

    def save(self, folder: Path) -> None:
        """Write ``features.json`` into ``folder``, and the vocabularies beside it."""
        distinct: list[Vocabulary] = []
        sparse = []
        for each in self.sparse:
            index = None
            if each.vocabulary == "build":
                if each.values not in distinct:
                    distinct.append(each.values)
                index = distinct.index(each.values)
            sparse.append({**each.fields, "values": index})
        write_vocabularies(folder / VOCABULARIES_FILE, distinct)
        sha256 = compute_checksum(folder / VOCABULARIES_FILE)
        text = self._to_json(FORMAT_VERSION, sparse, {"vocabularies": sha256})
        (folder / FILE_NAME).write_text(text, encoding="utf-8")

    def _to_json(self, version: int, sparse: list[dict[str, Any]], more: dict[str, str]) -> str:
        content = {
            "format": version,
            "dense": [asdict(each) for each in self.dense],
            "sparse": sparse,
            **more,
        }
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def load(cls, folder: StoragePath) -> FeatureEncoder:
        """Load what ``save`` or ``text`` wrote; DataError if it is missing or of another version."""
        path = folder / FILE_NAME
        content = _read_json(path)
        version = content.get("format") if isinstance(content, dict) else None
        if version not in (_WITH_VALUES, FORMAT_VERSION):
            raise DataError(
                f"{path}: format {version!r}, this version reads {_WITH_VALUES} and {FORMAT_VERSION}"
            )
        try:
            known = None
            if version == FORMAT_VERSION:
                sha256 = content["vocabularies"]
                known = read_vocabularies(_find_vocabularies(folder, sha256), sha256)
            dense = tuple(DenseEncoding(**d) for d in content["dense"])
            sparse = tuple(_sparse_encoding(s, known) for s in content["sparse"])
            is_valid = all(d.is_valid() for d in dense) and all(s.is_valid() for s in sparse)
        except (TypeError, KeyError, IndexError, pa.ArrowException) as error:
            raise DataError(f"{path}: does not define the encoding of columns ({error!r})") from error
        if not is_valid:
            raise DataError(f"{path}: does not define the encoding of columns")
        return cls(dense, sparse)


def vocabularies_of(folder: Path) -> dict[str, Path]:
    """Return the vocabulary file of prepared data, by its name in a run."""
    content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    return {f"{content['vocabularies']}.parquet": folder / VOCABULARIES_FILE}


def vocabularies_path(folder: StoragePath) -> StoragePath | None:
    """Return the vocabulary file of prepared data or of a checkpoint; None if features.json has the values.

    Raises:
        DataError: they are missing.
    """
    path = folder / FILE_NAME
    content = _read_json(path)
    if not isinstance(content, dict):
        raise DataError(f"{path}: cannot be read")
    sha256 = content.get("vocabularies")
    return None if sha256 is None else _find_vocabularies(folder, sha256)


def _read_json(path: StoragePath) -> Any:
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _find_vocabularies(folder: StoragePath, sha256: Any) -> StoragePath:
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise TypeError("vocabularies must be a checksum")
    name = f"{sha256}.parquet"
    beside, of_run = folder / VOCABULARIES_FILE, vocabulary_path(folder.absolute(), name)
    for path in (beside, of_run):
        if exists(path):
            return path
    rule = f"copy {name} there from the folder vocabularies of the run"
    raise DataError(f"{beside}: the vocabularies are neither here nor in {of_run.parent}; {rule}")


def _sparse_encoding(content: Any, known: Sequence[Vocabulary] | None) -> SparseEncoding:
    """Return an encoding from JSON.

    Args:
        known: vocabularies, if the JSON has the index of one; None if it has the values.
    """
    given = content["values"]
    if known is None:
        if not all(type(value) is str for value in given):
            raise TypeError("a value is no text")
        values = Vocabulary.of(given)
    else:
        if given is not None and (type(given) is not int or given < 0):
            raise TypeError("values must be the index of a vocabulary")
        values = NO_VALUES if given is None else known[given]
    return SparseEncoding(**{**content, "values": values, "bounds": tuple(content["bounds"])})
