"""Values to numbers: vocabularies, hashing and scaling, fitted on the training rows alone.

Row 0 of every table is for missing values and for those unknown at training time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.config import ColumnSection, DataSection
from hybrid.data.fitting import fitter_of
from hybrid.data.layout import Layout
from hybrid.data.scaling import DenseEncoding, Moments, scaled
from hybrid.data.sources import RawBlock
from hybrid.data.sparse_encoding import Bags, SparseEncoding
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec, InputSpec

FILE_NAME = "features.json"
FORMAT_VERSION = 3


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
    ) -> FeatureEncoder:
        """Learn vocabularies, scales and the bounds of buckets from the training rows.

        Memory grows with the number of distinct values (vocabulary = build), not of rows.

        Raises:
            DataError: there are no rows.
        """
        layout = Layout.of(data, columns, with_labels=False)
        moments = Moments(layout.dense)
        fitters = [fitter_of(column) for column in layout.sparse]
        for block in blocks:
            moments.add(block.dense_BF)
            for fitter, column in zip(fitters, block.sparse, strict=True):
                fitter.add(column)
        if not moments.num_rows:
            raise DataError("no row is left to train on; check data.path and data.test_fraction")
        return cls(moments.encodings(), tuple(fitter.encoding() for fitter in fitters))

    @classmethod
    def of_rows(cls, spec: InputSpec) -> FeatureEncoder:
        """For batches that hold numbers as they are, and rows of tables as ids: it changes neither."""
        dense = tuple(map(DenseEncoding, spec.dense_features))
        features = spec.sparse_features
        sparse = tuple(SparseEncoding(f.name, "identity", f.num_rows, f.multi_hot) for f in features)
        return cls(dense, sparse)

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
            sparse = tuple(_sparse_encoding(s) for s in content["sparse"])
            is_right = all(d.is_right() for d in dense) and all(s.is_right() for s in sparse)
        except (TypeError, KeyError) as error:
            raise DataError(f"{path}: does not say how columns become numbers ({error!r})") from error
        if not is_right:
            raise DataError(f"{path}: does not say how columns become numbers")
        return cls(dense, sparse)


def _sparse_encoding(content: Any) -> SparseEncoding:
    lists = {name: tuple(content[name]) for name in ("values", "bounds")}
    return SparseEncoding(**{**content, **lists})
