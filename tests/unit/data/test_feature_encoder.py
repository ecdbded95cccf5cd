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
from hybrid.data.encode.feature_encoder import FORMAT_VERSION, EncodedBags, FeatureEncoder, SparseEncoding
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values.canonical import hash_texts
from hybrid.data.values.column_values import parse_values
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec

DATA = DataSection(format="csv", dense=("x",), sparse=("city",))


def raw(x: list[float], city: Sequence[str | list[str] | None]) -> RawBlock:
    kind = pa.list_(pa.string()) if any(isinstance(value, list) for value in city) else pa.string()
    dense_BF = np.array(x, np.float64)[:, None]
    return RawBlock(dense_BF, (parse_values(pa.array(city, kind), ()).coded,), None, np.arange(len(x)))


def test_vocabulary_is_ordered_by_frequency_then_text() -> None:
    blocks = [raw([0, 0, 0], ["b", "c", "a"]), raw([0, 0, 0], ["c", None, "d"])]
    encoder = fit(blocks, DATA)
    assert [*(encoder.sparse[0].values or ())] == ["c", "a", "b", "d"]
    assert encoder.input_spec.sparse_features == (FeatureSpec("city", 5),)
    encoded = encoder.encode(raw([0] * 5, ["c", "a", "d", None, "new"]))
    assert encoded.ids_BK.tolist() == [[1], [2], [4], [0], [0]]
    assert encoded.ids_BK.dtype == np.int32


def test_hashes_are_stable() -> None:
    texts = pa.array(["x", "68fd1e64", None, "ü", "", "a" * 300])[1:]
    known = [
        16152645408540456209,
        13020603013274838756,
        3976460501203677525,
        13020603013274838756,
        11684963924624161163,
    ]
    assert hash_texts(texts).tolist() == known
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


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
def test_a_constant_column_becomes_zero(value: float) -> None:
    encoder = fit([raw([value] * 3, ["a"] * 3)] * 3, DATA)
    assert encoder.encode(raw([value], ["a"])).dense_BF.item() == pytest.approx(0, abs=1e-9)


def test_lists_of_one_value_are_one_id_and_several_are_unknown() -> None:
    encoder = fit([raw([0, 0], [["a"], []])], DATA)
    assert encoder.input_spec.sparse_features == (FeatureSpec("city", 2),)
    assert not isinstance(encoder.sparse[0].encode(raw([0], [["a"]]).sparse[0]), EncodedBags)
    encoded = encoder.encode(raw([0, 0, 0], [["a", "a"], ["a"], []]))
    assert encoded.ids_BK.tolist() == [[0], [1], [0]]


@pytest.mark.parametrize("vocabulary", ["build", "hash", "grow"])
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
VALID = {"name": "c", "vocabulary": "hash", "num_rows": 5, "values": None, "bounds": []}
BUCKETS = VALID | {"vocabulary": "buckets", "num_rows": 4, "bounds": [1.0, 2.0]}
WRONG: list[dict[str, Any]] = [
    {"dense": 3},
    *({"vocabularies": name} for name in (1, "../../secret", 64 * "g")),
    *(
        {"dense": [{"name": "x", **changes}]}
        for changes in ({"shift": "0"}, {"scale": 0.0}, {"scale": math.inf}, {"other": 1}, {"transform": "e"})
    ),
    {"sparse": [{"name": "c"}]},
    *(
        {"sparse": [VALID | changes]}
        for changes in (
            {"num_rows": 5.0},
            {"num_rows": 2**40},
            {"vocabulary": "grow"},
            {"vocabulary": "other"},
            {"vocabulary": ["build"]},
            {"values": [7]},
            {"values": 0},
            {"weighted": True},
        )
    ),
    *({"sparse": [BUCKETS | changes]} for changes in ({"bounds": [2.0, 1.0]}, {"bounds": [1.0, math.nan]})),
    {"sparse": [BUCKETS | {"num_rows": 3}]},
]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        (100_000 * "[", "cannot be read"),
        ("[]", "format None"),
        ('{"format": 99}', "format 99"),
        *((json.dumps({**SOUND, **change}), "does not define") for change in WRONG),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_invalid_encoder_file_is_a_one_line_error(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "features.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=f"^{path}: {reason}[^\n]*$"):
        FeatureEncoder.load(tmp_path)
