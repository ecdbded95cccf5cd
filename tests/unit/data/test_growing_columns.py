"""Columns of growing tables: the keys of values, and prepared data."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import csv_config, prepared, whole, write

from hybrid.config import ColumnSection, DataSection, RunConfig, TableSection
from hybrid.config.loading import validate
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.preparation import fingerprint
from hybrid.data.values.canonical import canonicalize, compute_keys
from hybrid.embedding.table_spec import Growth
from hybrid.engine.model_builder import table_specs
from hybrid.input_spec import FeatureSpec
from workers.console.messages import data_notes

M = 2**64


def mixed(number: int) -> int:
    """Return the SplitMix64 hash of a number, in Python's integers."""
    x = (number + 0x9E3779B97F4A7C15) % M
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % M
    x = (x ^ x >> 27) * 0x94D049BB133111EB % M
    return x ^ x >> 31


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


EDGES = [edge + d for edge in (0, 2**31, 2**53, 2**63, M, -(2**63)) for d in (-2, -1, 0, 1, 2)]
INTEGERS = [n for n in [*EDGES, 10**18, 10**19, -(10**18)] if -(2**63) <= n < M]
TEXTS = ["", "u1", "Zürich", "007", "+7", "1.5", "5e0", "12\x1f34", "٣", "-", "1\n"]
FAR = [n for n in [*EDGES, 10**20, -(10**19), -(10**20), 2 * 10**19] if n not in INTEGERS]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_keys_are_hashes_of_bits_or_of_texts(kind: Any) -> None:
    expected = {str(n): mixed(n % M) for n in INTEGERS} | {t: digest(t) for t in [*TEXTS, *map(str, FAR)]}
    keys = compute_keys(pa.array([*expected, None], kind))
    assert keys.dtype == np.int64
    assert keys.view(np.uint64).tolist() == [*expected.values(), 0]
    assert len(compute_keys(pa.array([], kind))) == 0


def test_fixed_keys_never_change() -> None:
    """The key of 0 is the first number of the published generator of seed 0."""
    keys = compute_keys(pa.array(["0", "1", "-1", str(2**63), "u1"])).view(np.uint64).tolist()
    assert keys == [
        0xE220A8397B1DCDAF,
        0x910A2DEC89025CC1,
        0xE4D971771B652C20,
        0x481EC0A212A9F3DB,
        0xD56A4E3F684D9992,
    ]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([5, -7, 0]),
        pa.array([5.0, -7.0, -0.0]),
        pa.array(["5", "-7", "0"]),
        pa.array([" 5", "-7.0", "-0"]),
        pa.array(["5.0", "-7e+00", "-0.0"]),
        pa.array([5, -7, 0], pa.int8()),
    ],
)
def test_equal_numbers_have_one_key(column: Any) -> None:
    texts, _ = canonicalize(column)
    assert compute_keys(texts).view(np.uint64).tolist() == [mixed(5), mixed(-7 % M), mixed(0)]


ROWS = """label,user,item,tags,seen,age,day
1,7,i1,a:0.5|9:2,i2|7|i1,17,x
0,7.0,,,,40,y
1,-1,i2,9:1,7,50,x
0,18446744073709551614,i1,a:3,i1,,x
"""
GROWING = ("user", "item", "user_day", "tags", "seen")
COLUMNS = {
    "user_day": ColumnSection(kind="cross", source=("user", "day")),
    "tags": ColumnSection(kind="weighted", multi_hot_separator="|"),
    "seen": ColumnSection(multi_hot_separator="|", max_ids=2, too_many_ids="keep_last", pooling="none"),
    "age": ColumnSection(kind="buckets(18, 45)"),
    "day": ColumnSection(vocabulary="build"),
}


def key(value: int | str) -> int:
    """Return the expected key of a value, as int64."""
    bits = mixed(value % M) if isinstance(value, int) else digest(value)
    return bits - M if bits >= M // 2 else bits


def rows_config(folder: Path, vocabulary: str = "grow", **sections: ColumnSection) -> RunConfig:
    train, test = write(folder / "rows.csv", ROWS), write(folder / "new.csv", ROWS.replace("x", "z"))
    sparse = (*GROWING, "age", "day")
    config = csv_config(train, sparse=sparse, test_path=(str(test),), vocabulary=vocabulary)
    tables = {"items": TableSection(features=("item", "seen"))}
    return config.replace(columns={**COLUMNS, **sections}, tables=tables)


def bags_of(dataset: PreparedDataset) -> dict[str, list[list[int]]]:
    """Return the ids of each sample, by column."""
    sparse, size = whole(dataset).sparse_features, dataset.num_samples
    assert sparse.offsets is not None
    bags = [ids.tolist() for ids in sparse.ids_L.tensor_split(sparse.offsets[1:-1])]
    names = [feature.name for feature in dataset.input_spec.sparse_features]
    return {name: bags[k * size : (k + 1) * size] for k, name in enumerate(names)}


def test_columns_of_each_kind_are_prepared_as_keys(tmp_path: Path) -> None:
    config = rows_config(tmp_path)
    validate(config)
    train, test = prepared(config, tmp_path / "cache")
    users = [key(7), key(7), key(-1), key(M - 2)]
    assert bags_of(train) == {
        "user": [[user] for user in users],
        "item": [[key("i1")], [0], [key("i2")], [key("i1")]],
        "user_day": [[key(text)] for text in ("7\x1fx", "7\x1fy", "-1\x1fx", f"{M - 2}\x1fx")],
        "tags": [[key("a"), key(9)], [], [key(9)], [key("a")]],
        "seen": [[key(7), key("i1")], [], [key(7)], [key("i1")]],
        "age": [[1], [2], [3], [0]],
        "day": [[1], [2], [1], [1]],
    }
    assert bags_of(test)["user_day"][0] == [key("7\x1fz")]
    encoder = FeatureEncoder.load(train.folder)
    assert encoder.input_spec == train.input_spec
    specs = train.input_spec.sparse_features
    assert [spec.name for spec in specs if spec.is_growing] == [*GROWING]
    assert specs[3:5] == (FeatureSpec("tags", 0, True, True), FeatureSpec("seen", 0, True))
    assert [[*values] for values in encoder.vocabularies] == [["x", "y"]]
    # Only the workers know which keys have rows.
    assert {u.name: (u.count, u.expected) for u in test.report.unknown} == {"age": (0, 0.0), "day": (3, 0.25)}
    assert not any(train.folder.rglob("*segments*"))


@pytest.mark.parametrize(
    ("vocabulary", "one_id", "tags", "seen"),
    [("grow", np.int64, np.int64, np.int64), ("build", np.int32, np.int64, np.int32)],
)
def test_arrays_with_keys_are_wide(
    tmp_path: Path, vocabulary: str, one_id: Any, tags: Any, seen: Any
) -> None:
    section = ColumnSection(kind="weighted", multi_hot_separator="|", vocabulary="grow")
    train, test = prepared(rows_config(tmp_path, vocabulary, tags=section), tmp_path / "cache")
    for split in ("train", "test"):
        names = ("ids", "bag_3_ids", "bag_4_ids")
        types = [np.load(train.folder / split / f"{name}.npy").dtype for name in names]
        assert types == [one_id, tags, seen]
    assert bags_of(test)["tags"] == [[key("a"), key(9)], [], [key(9)], [key("a")]]


def test_several_values_in_a_column_of_one_have_the_key_of_missing_ones(tmp_path: Path) -> None:
    new = write(tmp_path / "new.csv", "label,user\n1,u1|u2\n0,u1\n1,\n")
    train = write(tmp_path / "rows.csv", "label,user\n1,u1\n0,u3\n")
    config = csv_config(
        train, sparse=("user",), test_path=(str(new),), vocabulary="grow", multi_hot_separator="|"
    )
    _, test = prepared(config, tmp_path / "cache")
    assert whole(test).sparse_features.ids_L.tolist() == [0, key("u1"), 0]
    (user,) = test.report.unknown
    assert (user.count, user.num_values, user.several) == (1, 2, 1)
    (note,) = data_notes(test.report)
    assert "1 row(s)" in note


def test_parquet_has_the_keys_of_text(tmp_path: Path) -> None:
    columns = {
        "label": pa.array([1, 0, 1]),
        "user": pa.array([2**63, 5, None], pa.uint64()),
        "item": pa.array([5.0, -3.0, None]),
        "seen": pa.array([[-1, 5], [], [2**62]], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    data = DataSection(
        format="parquet",
        path=(str(tmp_path / "rows.parquet"),),
        sparse=("user", "item", "seen"),
        split="none",
        vocabulary="grow",
    )
    train, _ = prepared(RunConfig(data=data), tmp_path / "cache")
    assert bags_of(train) == {
        "user": [[key(2**63)], [key(5)], [0]],
        "item": [[key(5)], [key(-3)], [0]],
        "seen": [[key(-1), key(5)], [], [key(2**62)]],
    }


def test_how_a_table_grows_does_not_change_prepared_data(tmp_path: Path) -> None:
    config = rows_config(tmp_path)
    before = fingerprint(config)
    for vocabulary in ("grow(2, max_rows = 10000, evict_after = 9)", 'grow(unknown = "zeros")'):
        assert fingerprint(config.replace_value("data", "vocabulary", vocabulary)) == before
    for vocabulary in ("hash", "build", "build(2)", "hash(9)"):
        assert fingerprint(config.replace_value("data", "vocabulary", vocabulary)) != before
    found = {
        fingerprint(config.replace_value("columns.tags", "vocabulary", vocabulary))
        for vocabulary in ("grow", "grow(3)", "grow(half_life = 7)")
    }
    assert len(found) == 1


TAGS = ColumnSection(kind="weighted", multi_hot_separator="|", vocabulary="grow(3)")


def test_a_table_grows_as_its_columns(tmp_path: Path) -> None:
    config = rows_config(tmp_path, "grow(2, max_rows = 10000)", tags=TAGS)
    train, _ = prepared(config, tmp_path / "cache")
    specs = {table.name: table for table in table_specs(config, train.input_spec)}
    grown = {name: table.growth for name, table in specs.items() if table.num_rows == 0}
    of_data = Growth(admit_after=2, max_rows=10_000)
    assert grown == {"user": of_data, "items": of_data, "user_day": of_data, "tags": Growth(admit_after=3)}
    assert (specs["age"].growth, specs["age"].num_rows) == (None, 4)
    assert specs["user"].init_scale == pytest.approx(1 / 100)
    assert specs["tags"].init_scale == pytest.approx(1 / 1000)
