"""Values to numbers: vocabularies, hashing, scaling, and the file of an encoder."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.samples import fit

from hybrid.config import DataSection
from hybrid.data.encode.feature_encoder import FORMAT_VERSION, FeatureEncoder
from hybrid.data.encode.sparse_encoding import EncodedBags, SparseEncoding
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.canonical import stable_hashes
from hybrid.data.values.column_values import values
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec

DATA = DataSection(format="csv", dense=("x",), sparse=("city",))


def raw(x: list[float], city: Sequence[str | list[str] | None]) -> RawBlock:
    kind = pa.list_(pa.string()) if any(isinstance(value, list) for value in city) else pa.string()
    dense_BF = np.array(x, np.float64)[:, None]
    return RawBlock(dense_BF, (values(pa.array(city, kind), ()).coded,), None, np.arange(len(x)))


def test_vocabulary_is_ordered_by_frequency_then_text() -> None:
    blocks = [raw([0, 0, 0], ["b", "c", "a"]), raw([0, 0, 0], ["c", None, "d"])]
    encoder = fit(blocks, DATA)
    assert encoder.sparse[0].values == ("c", "a", "b", "d")
    assert encoder.input_spec.sparse_features == (FeatureSpec("city", 5),)
    encoded = encoder.encode(raw([0] * 5, ["c", "a", "d", None, "new"]))
    assert encoded.ids_BK.tolist() == [[1], [2], [4], [0], [0]]
    assert encoded.ids_BK.dtype == np.int32


def test_rare_values_share_row_zero() -> None:
    data = DataSection(dense=("x",), sparse=("city",), vocabulary="build(2)")
    encoder = fit([raw([0, 0, 0], ["a", "b", "a"])], data)
    assert encoder.encode(raw([0, 0], ["a", "b"])).ids_BK.tolist() == [[1], [0]]


def test_hashing_keeps_row_zero_for_missing_values() -> None:
    data = DataSection(dense=("x",), sparse=("city",), vocabulary="hash(5)")
    encoder = fit([raw([0], ["a"])], data)
    ids = encoder.encode(raw([0] * 201, [*(f"v{i}" for i in range(200)), None])).ids_BK[:, 0]
    assert set(ids[:-1].tolist()) == {1, 2, 3, 4}
    assert ids[-1] == 0


def test_hashes_are_stable() -> None:
    texts = pa.array(["x", "68fd1e64", None, "ü", "", "a" * 300])[1:]
    known = [
        16152645408540456209,
        13020603013274838756,
        3976460501203677525,
        13020603013274838756,
        11684963924624161163,
    ]
    assert stable_hashes(texts).tolist() == known
    encoding = SparseEncoding("c", "hash", 1001)
    assert encoding.rows(texts).tolist() == [0 if i == 1 else 1 + each % 1000 for i, each in enumerate(known)]


def test_scaling_is_fitted_on_all_blocks() -> None:
    rng = np.random.default_rng(0)
    x = 1e6 + rng.standard_normal(1000)
    x[::7] = np.nan
    blocks = [raw(part.tolist(), ["a"] * len(part)) for part in np.array_split(x, 9)]
    encoder = fit(blocks, DATA)
    assert encoder.dense[0].shift == pytest.approx(np.nanmean(x), abs=1e-9)
    assert encoder.dense[0].scale == pytest.approx(np.nanstd(x), rel=1e-9)
    encoded = encoder.encode(raw([np.nan, float(np.nanmean(x))], ["a", "a"]))
    np.testing.assert_allclose(encoded.dense_BF, [[0], [0]], atol=1e-9)
    assert encoded.dense_BF.dtype == np.float32


def test_log_transform_and_no_scaling() -> None:
    data = DataSection(dense=("x",), sparse=("city",), numeric_scaling="none(log = true)")
    encoder = fit([raw([0], ["a"])], data)
    encoded = encoder.encode(raw([np.e - 1, 1 - np.e, np.nan], ["a"] * 3))
    np.testing.assert_allclose(encoded.dense_BF[:, 0], [1, -1, 0], rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
def test_a_constant_column_becomes_zero(value: float) -> None:
    encoder = fit([raw([value] * 3, ["a"] * 3)] * 3, DATA)
    assert encoder.encode(raw([value], ["a"])).dense_BF.item() == pytest.approx(0, abs=1e-9)


def test_multi_hot_features_are_encoded_as_bags() -> None:
    encoder = fit([raw([0, 0], [["a", "b"], ["a"]])], DATA)
    assert encoder.input_spec.sparse_features == (FeatureSpec("city", 3, multi_hot=True),)
    encoded = encoder.encode(raw([0, 0, 0], [["b", "new"], [], ["a"]]))
    assert encoded.ids_BK.shape == (3, 0)
    [bags] = encoded.bags
    assert (bags.ids_L.tolist(), bags.lengths_B.tolist()) == ([2, 0, 1], [2, 0, 1])


def test_lists_of_one_value_are_one_id_and_several_are_unknown() -> None:
    encoder = fit([raw([0, 0], [["a"], []])], DATA)
    assert encoder.input_spec.sparse_features == (FeatureSpec("city", 2),)
    assert not isinstance(encoder.sparse[0].encode(raw([0], [["a"]]).sparse[0]), EncodedBags)
    encoded = encoder.encode(raw([0, 0, 0], [["a", "a"], ["a"], []]))
    assert encoded.ids_BK.tolist() == [[0], [1], [0]]


@pytest.mark.parametrize("vocabulary", ["build", "hash"])
def test_loaded_encoder_equals_saved_encoder(tmp_path: Path, vocabulary: str) -> None:
    scaling = "standardize(log = true)"
    data = DataSection(dense=("x",), sparse=("city",), numeric_scaling=scaling, vocabulary=vocabulary)
    block = raw([0.1, 1 / 3, np.nan], ["Zürich", 'a"\\\n', "東京"])
    encoder = fit([block], data)
    encoder.save(tmp_path)
    loaded = FeatureEncoder.load(tmp_path)
    assert loaded == encoder
    for left, right in zip(loaded.encode(block), encoder.encode(block), strict=True):
        np.testing.assert_array_equal(left, right)


SOUND = {"format": FORMAT_VERSION, "dense": [], "sparse": []}
BUCKETS = {"name": "c", "vocabulary": "buckets", "num_rows": 4, "values": [], "bounds": [1.0, 2.0]}
WRONG: list[dict[str, Any]] = [
    {"dense": 3},
    {"dense": [{"name": "x", "shift": "0", "scale": 1.0}]},
    {"dense": [{"name": "x", "shift": 0.0, "scale": 0.0}]},
    {"dense": [{"name": "x", "other": 1}]},
    {"sparse": [{"name": "c"}]},
    {"sparse": [{"name": "c", "vocabulary": "hash", "num_rows": 1}]},
    {"sparse": [{"name": "c", "vocabulary": "build", "num_rows": 1, "values": ["a"], "bounds": []}]},
    {"sparse": [{"name": "c", "vocabulary": "other", "num_rows": 5, "values": [], "bounds": []}]},
    {"sparse": [{"name": "c", "vocabulary": ["build"], "num_rows": 5, "values": [], "bounds": []}]},
    {"sparse": [{"name": "c", "vocabulary": "build", "num_rows": 2, "values": [7], "bounds": []}]},
    {"sparse": [{"name": "c", "vocabulary": "identity", "num_rows": 2**40, "values": [], "bounds": []}]},
    {"dense": [{"name": "x", "transform": "exp"}]},
    {"sparse": [BUCKETS | {"bounds": [2.0, 1.0]}]},
    {"sparse": [BUCKETS | {"bounds": [1.0, math.nan]}]},
    {"sparse": [BUCKETS | {"num_rows": 3}]},
    {"sparse": [BUCKETS | {"weighted": True}]},
]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        (100_000 * "[", "cannot be read"),
        ("[]", "format None, this version reads 3 and 4"),
        ("{}", "format None, this version reads 3 and 4"),
        ('{"format": 99}', "format 99, this version reads 3 and 4"),
        *((json.dumps({**SOUND, **change}), "does not define the encoding of columns") for change in WRONG),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_invalid_encoder_file_is_a_one_line_error(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "features.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=f"^{path}: {reason}[^\n]*$"):
        FeatureEncoder.load(tmp_path)
