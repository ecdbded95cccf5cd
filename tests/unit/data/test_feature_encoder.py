"""Values to numbers: vocabularies, hashing, scaling, and the files of an encoder."""

import json
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import fit

from hybrid.checkpoint.checkpoint_folders import VOCABULARIES_FILE, write_vocabulary
from hybrid.config import DataSection
from hybrid.data.encode.feature_encoder import (
    FORMAT_VERSION,
    EncodedBags,
    FeatureEncoder,
    SparseEncoding,
    vocabulary_files,
)
from hybrid.data.encode.vocabulary_file import open_vocabularies, write_vocabularies
from hybrid.data.parse.sources import RawBlock
from hybrid.data.values import vocabulary
from hybrid.data.values.canonical import hash_texts
from hybrid.data.values.column_values import parse_values
from hybrid.data.values.vocabulary import Vocabulary
from hybrid.errors import DataError
from hybrid.input_spec import FeatureSpec
from hybrid.storage.files import compute_checksum

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
    of_tensors = FeatureEncoder.identity(encoder.input_spec)
    of_tensors.save(tmp_path)
    assert FeatureEncoder.load(tmp_path) == of_tensors


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


def words(count: int, seed: int) -> list[str]:
    """Return short and long texts with common prefixes and suffixes, some of them empty or not ASCII."""
    draw = random.Random(seed)
    found = {"", "\0", "\0\0", "é", "e\u0301", "x" * 4096, "x" * 4095 + "y", "y" + "x" * 4096}
    while len(found) < count:
        found.add("".join(draw.choices("ab\u20ac", k=draw.randrange(12))) + str(draw.randrange(count)))
    return draw.sample(sorted(found), count)


@pytest.mark.parametrize("bits", [64, 5, 0])
def test_indices_equal_those_of_a_dict(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts may have equal hashes."""
    hashes = vocabulary._hash
    monkeypatch.setattr(vocabulary, "_hash", lambda texts: hashes(texts) & np.uint64(2**bits - 1))
    known, requested = words(300, 1), words(500, 2)
    found = Vocabulary.of(known)
    index_of = {word: index for index, word in enumerate(known)}
    texts = pa.array([*requested, None, *known], pa.string())
    expected = [*(index_of.get(word, -1) for word in requested), -1, *range(300)]
    assert found.indices(texts).tolist() == expected
    assert found.indices(texts.slice(7, 400)).tolist() == expected[7:407]
    shorter = Vocabulary(found.texts[100:])
    assert shorter.indices(texts).tolist() == [max(index - 100, -1) for index in expected]


def read_vocabularies(path: Path, sha256: str) -> list[Vocabulary]:
    with open_vocabularies(path.parent, sha256) as file:
        return file.read_all()


def test_read_vocabularies_equal_written_ones(tmp_path: Path) -> None:
    vocabularies = [Vocabulary.of(words(50, 1)), Vocabulary.of([]), Vocabulary.of(words(70, 2))]
    path = tmp_path / VOCABULARIES_FILE
    write_vocabularies(path, vocabularies)
    assert read_vocabularies(path, compute_checksum(path)) == vocabularies
    wrong = 64 * "0"
    with pytest.raises(DataError, match=f"^{path}: altered"):
        read_vocabularies(path, wrong)
    pq.write_table(pa.table({"value": ["a", None]}), path)
    right = compute_checksum(path)
    for checksum in (right, wrong):
        with pytest.raises(DataError, match=f"^{path}: "):
            read_vocabularies(path, checksum)
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("RLE_DICTIONARY", "not encoded"),
        ("DELTA_BYTE_ARRAY", "not encoded"),
        ("DELTA_LENGTH_BYTE_ARRAY", "claims 2,097,152"),
    ],
)
def test_small_file_with_a_large_vocabulary_is_refused(tmp_path: Path, encoding: str, message: str) -> None:
    path, size = tmp_path / VOCABULARIES_FILE, 2 << 20
    schema = pa.schema([pa.field("value", pa.large_string(), False)], {b"sizes": str([size]).encode()})
    values = pa.array([""], pa.large_string()).take(pa.array(np.zeros(size, np.int8)))
    is_dictionary = encoding == "RLE_DICTIONARY"
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=is_dictionary,
        column_encoding=None if is_dictionary else {"value": encoding},
        write_statistics=False,
    ) as writer:
        writer.write_table(pa.table([values], schema), size)
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match=f"^{path}: .*{message}"):
        read_vocabularies(path, compute_checksum(path))


def test_shared_vocabulary_is_written_once(tmp_path: Path) -> None:
    values = Vocabulary.of(words(40, 1))
    sparse = [SparseEncoding(name, "build", 41, values=Vocabulary(values.texts)) for name in ("item", "seen")]
    sparse.append(SparseEncoding("shop", "build", 3, values=Vocabulary.of(["b", "a"])))
    encoder = FeatureEncoder((), (*sparse, SparseEncoding("user", "hash", 9)))
    encoder.save(tmp_path)
    assert pq.read_metadata(tmp_path / VOCABULARIES_FILE).num_rows == 42
    assert FeatureEncoder.load(tmp_path) == encoder


def test_checkpoint_finds_the_vocabulary_files_its_run(tmp_path: Path) -> None:
    prepared, checkpoint = tmp_path / "prepared", tmp_path / "run/checkpoints/step-00000001"
    encoder = FeatureEncoder((), (SparseEncoding("item", "build", 3, values=Vocabulary.of(["b", "a"])),))
    prepared.mkdir()
    checkpoint.mkdir(parents=True)
    encoder.save(prepared)
    shutil.copyfile(prepared / "features.json", checkpoint / "features.json")
    ((name, source),) = vocabulary_files(prepared).items()
    kept = tmp_path / "run/vocabularies" / name
    with pytest.raises(DataError, match=f"{kept.parent}; .*{name}"):
        FeatureEncoder.load(checkpoint)
    kept.parent.mkdir()
    (tmp_path / "mine").write_text("kept")
    for unfinished in (f"{name}.partial", f".{name}.unfinished"):
        (kept.parent / unfinished).symlink_to(tmp_path / "mine")
    assert write_vocabulary(checkpoint, name, source) == {}
    assert (tmp_path / "mine").read_text() == "kept"
    (kept.parent / f"{name}.partial").unlink()
    assert FeatureEncoder.load(checkpoint) == encoder
    stamp = kept.stat().st_mtime_ns
    write_vocabulary(checkpoint.with_name("step-00000002"), name, source)
    assert (kept.stat().st_mtime_ns, [*kept.parent.iterdir()]) == (stamp, [kept])
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"^{kept}: altered"):
        FeatureEncoder.load(checkpoint)
    shutil.copyfile(source, checkpoint / VOCABULARIES_FILE)
    kept.unlink()
    assert FeatureEncoder.load(checkpoint) == encoder
