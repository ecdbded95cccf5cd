"""Columns of data.sparse of every kind, also those of growing tables, as on docs/data.md; invalid rows."""

import dataclasses
import hashlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import ROOT, code_block
from support.samples import csv_config, fit, located, prepared, read, whole, write

from hybrid.config import ColumnSection, DataSection, RunConfig, TableSection
from hybrid.config.loading import load_config, validate
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import EncodedBags, FeatureEncoder
from hybrid.data.prepare.preparation import fingerprint, prepare
from hybrid.data.values.canonical import canonicalize, compute_keys, hash_texts
from hybrid.embedding.table_spec import Growth
from hybrid.engine.model_builder import table_specs
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import FeatureSpec
from workers.console import data_notes

TAGS = ColumnSection(kind="weighted", multi_hot_separator="|")


def data_of(sparse: str, **keys: Any) -> DataSection:
    return DataSection(format="csv", sparse=tuple(sparse.split()), max_invalid_fraction=1.0, **keys)


def encoded(
    path: Path, data: DataSection, columns: Mapping[str, ColumnSection]
) -> tuple[FeatureEncoder, list[list[int]], list[EncodedBags]]:
    """Fit an encoder on the rows of a file, and encode them."""
    block, report = read(data, path, columns=columns)
    assert report.total == 0
    encoder = fit([block], data, columns)
    result = encoder.encode(block)
    return encoder, result.ids_BK.T.tolist(), list(result.bags)


def test_cross_columns(tmp_path: Path) -> None:
    rows = ["a,1.0,x", "a,2,x", "b,1,x", "b,?,x", "a,1,x", ",2,x", "ab,,x"]
    path = write(tmp_path / "a.csv", "label,city,user,c\n" + "".join(f"1,{row}\n" for row in rows))
    columns = {"both": ColumnSection(kind="cross", source=("city", "user", "c"), vocabulary="hash(1000)")}
    encoder, (both,), _ = encoded(path, data_of("both"), columns)
    assert encoder.input_spec.sparse_features[0].num_rows == 1000
    assert both[0] == both[4] == 1 + int(hash_texts(pa.array(["a\x1f1\x1fx"]))[0]) % 999
    assert both[3] == both[5] == both[6] == 0
    assert len({*both}) == 4
    block, _ = read(data_of("both"), path, columns=columns, block_bytes=20)
    assert encoder.encode(block).ids_BK[:, 0].tolist() == both


def test_weighted_ids_of_text(tmp_path: Path) -> None:
    rows = ["a:0.5|b:2", "", "?", "b:0", " c:1:1e-1 | |a:3", "a:1"]
    path = write(tmp_path / "a.csv", "label,tags\n" + "".join(f"1,{row}\n" for row in rows))
    encoder, _, (tags,) = encoded(path, data_of("tags"), {"tags": TAGS})
    (feature,) = encoder.input_spec.sparse_features
    assert (feature.num_rows, feature.multi_hot, feature.weighted) == (4, True, True)
    assert [*(encoder.sparse[0].values or ())] == ["a", "b", "c:1"]
    assert np.diff(tags.offsets).tolist() == [2, 0, 0, 1, 2, 1]
    assert tags.ids_L.tolist() == [1, 2, 2, 3, 1, 1]
    assert tags.weights_L is not None
    assert tags.weights_L.dtype == np.float32
    np.testing.assert_allclose(tags.weights_L, [0.5, 2, 0, 0.1, 3, 1])


@pytest.mark.parametrize(
    "kinds", [("float64", "int64"), ("float64", "string"), ("int64", "string"), ("int64", "int64")]
)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_weighted_ids_of_structs(tmp_path: Path, kinds: tuple[str, str], is_swapped: bool) -> None:
    """Types and names tell the id and its weight."""
    weight, label = (pa.field("w", kinds[0]), pa.field("n", kinds[1]))
    if kinds[0] == kinds[1]:
        weight = weight.with_name("weight")
    fields = [weight, label] if is_swapped else [label, weight]
    rows = [[{weight.name: 2, label.name: "7" if kinds[1] == "string" else 7}], []]
    tags = pa.array(rows, pa.list_(pa.struct(fields)))
    pq.write_table(pa.table({"label": [0, 1], "tags": tags}), tmp_path / "a.parquet")
    data = DataSection(format="parquet", sparse=("tags",))
    block, _ = read(data, tmp_path / "a.parquet", columns={"tags": TAGS})
    assert (block.sparse[0].to_pylist(), block.weights[0].to_pylist()) == ([["7"], []], [[2], []])


def test_column_for_several_ids_is_multi_hot_without_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "label,tags,city\n1,a,x\n0,b,y\n")
    data = data_of("tags city", multi_hot_separator="|")
    encoder, _, (tags,) = encoded(path, data, {"tags": ColumnSection(multi_hot_separator="|")})
    assert [each.multi_hot for each in encoder.sparse] == [True, False]
    assert tags.ids_L.tolist() == [1, 2]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("too_many", "kept"), [("keep_first", "abc"), ("keep_last", "cde")])
def test_long_lists_are_truncated(tmp_path: Path, too_many: str, kept: str, weighted: bool) -> None:
    weight = {letter: i + 1 for i, letter in enumerate("abcde")}
    rows = [*("abcde", "ab", "", "cab")]
    write_row = [":{0}".format, "".format][not weighted]
    texts = ["|".join(letter + write_row(weight[letter]) for letter in row) for row in rows]
    path = write(tmp_path / "a.csv", "label,seen\n" + "".join(f"1,{text}\n" for text in texts))
    column = ColumnSection(
        kind="weighted" if weighted else "value", multi_hot_separator="|", max_ids=3, too_many_ids=too_many
    )
    encoder, _, (seen,) = encoded(path, data_of("seen"), {"seen": column})
    values = [*(encoder.sparse[0].values or ())]
    letters = "".join(values[i - 1] for i in seen.ids_L)
    assert (letters, np.diff(seen.offsets).tolist()) == (f"{kept}abcab", [3, 2, 0, 3])
    if weighted:
        assert seen.weights_L is not None
        assert seen.weights_L.tolist() == [weight[letter] for letter in letters]


def test_scaling_by_column(tmp_path: Path) -> None:
    rows = "1,0,3,5,a\n0,10,?,7,a\n1,?,1,9,a\n"
    path = write(tmp_path / "a.csv", f"label,x,y,z,city\n{rows}")
    data = data_of("city", dense=("x", "y", "z", "again", "given", "log"))
    columns = {
        "x": ColumnSection(numeric_scaling="min_max"),
        "y": ColumnSection(numeric_scaling="none(log = true)"),
        "again": ColumnSection(source=("x",)),
        "given": ColumnSection(source=("x",), numeric_scaling="given(-2, std = 4)"),
        "log": ColumnSection(source=("y",), numeric_scaling="given(mean = 1, std = 0.5, log = true)"),
    }
    block, _ = read(data, path, columns=columns)
    encoder = fit([block], data, columns)
    dense_BF = encoder.encode(block).dense_BF
    np.testing.assert_allclose(dense_BF[:, 0], [0, 1, 0.5])  # what is missing is the mean
    np.testing.assert_allclose(dense_BF[:, 1], [np.log(4), 0, np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(dense_BF[:, 2], np.array([-1, 0, 1]) * 1.5**0.5, rtol=1e-6)
    np.testing.assert_allclose(dense_BF[:, 3], [-1, 1, 0])
    np.testing.assert_allclose(dense_BF[:, 4], [0.5, 3, 0])
    np.testing.assert_allclose(dense_BF[:, 5], [2 * np.log(4) - 2, 0, 2 * np.log(2) - 2], rtol=1e-6)
    assert encoder.input_spec.dense_features == data.dense


@pytest.mark.parametrize(
    ("name", "section", "text", "expected"),
    [
        *(("age", ColumnSection(kind="buckets(1.0)"), text, "a finite number") for text in ("x", "inf")),
        ("time", ColumnSection(kind="hour"), "noon", "a date such as"),
        *(
            ("time", ColumnSection(kind="hour"), digits, "seconds since 1970, or a date format")
            for digits in ("14102109", "20170601", "2017060109", "170601")
        ),
        ("time", ColumnSection(kind="hour(%Y%m%d)"), "noon", "a date of the form %Y%m%d"),
        *(
            ("tags", TAGS, text, "a weight for each id")
            for text in ("a", "b:-0.5", "c:nan", "d:", "a:1|e:inf", "f:1e39")
        ),
        ("seen", ColumnSection(multi_hot_separator="|", max_ids=2), "a|b|c", "at most 2 ids"),
        ("both", ColumnSection(kind="cross", source=("both", "n")), "1e+17", "an id"),
    ],
)
def test_invalid_values_name_their_line_and_column(
    tmp_path: Path, name: str, section: ColumnSection, text: str, expected: str
) -> None:
    path = write(tmp_path / "a.csv", f"label,{name},n\n1,{text},k\n0,?,k\n")
    block, report = read(data_of(name), path, columns={name: section})
    (example,) = located(report, path)
    assert example.startswith(f"2: {name} is {text!r}, expected {expected}")
    assert block.source_rows_B.tolist() == [1]


def test_unsuitable_source_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    lists = pa.array([["a"], ["b"]])
    pq.write_table(pa.table({"label": [0, 1], "tags": lists, "n": [1, 2]}), path)
    data = DataSection(format="parquet", sparse=("x",))
    for section, message in (
        (ColumnSection(kind="weighted", source=("n",)), "found int64"),
        (ColumnSection(kind="buckets(1.0)", source=("tags",)), r"column tags .*columns\.x\.source"),
    ):
        with pytest.raises(DataError, match=f"^{path}: .*{message}"):
            read(data, path, columns={"x": section})
    for section, column in (
        (ColumnSection(kind="cross", source=("tags", "n")), "tags"),
        (ColumnSection(source=("tag",)), "tag"),
    ):
        with pytest.raises(ConfigError, match=rf"^columns\.x\.source = '{column}': "):
            read(data, path, columns={"x": section})


def test_columns_of_one_table_share_its_vocabulary(tmp_path: Path) -> None:
    """One column is a list, and the other requires frequent values."""
    rows = ["b,a|b|c,b", "b,c,x", "d,c|b,d", ",,b"]
    path = write(tmp_path / "a.csv", "label,item,seen,shop\n" + "".join(f"1,{row}\n" for row in rows))
    data = data_of("item seen shop", multi_hot_separator="|")
    columns = {"item": ColumnSection(vocabulary="build(2)")}
    block, _ = read(data, path, columns=columns)
    tables = {"item": TableSection(features=("item", "seen"))}
    item, seen, shop = fit([block], data, columns, tables).sparse
    assert [*(seen.values or ())] == ["b", "c", "a", "d"]
    assert [*(item.values or ())] == ["b", "c"]
    assert [*(shop.values or ())] == ["b", "d", "x"]
    apart = fit([block], data, columns).sparse
    assert [[*(each.values or ())] for each in apart] == [["b"], ["c", "b", "a"], ["b", "d", "x"]]


PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_example_of_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clicks.csv").write_text(code_block("docs/data.md", "csv"))
    Path("clicks.toml").write_text(code_block("docs/data.md", "toml"))
    dataset = PreparedDataset(prepare(load_config(Path("clicks.toml")), tmp_path / "cache"), "train")
    table = PAGE[PAGE.index("| row |") :].partition("\n\n")[0]
    heading, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n"))
    batch = dataset.gather(np.arange(4), 4)
    sparse, features = batch.sparse_features, dataset.input_spec.sparse_features
    assert sparse.offsets is not None
    assert sparse.weights_L is not None
    shown = {"row": list("1234"), "price": [f"{x:g}" for x in batch.dense_features[:, 0].tolist()]}
    for k, feature in enumerate(features):
        bounds = sparse.offsets[4 * k : 4 * k + 5].tolist()
        words = [
            f"{row} x {weight:g}" if feature.weighted else str(row)
            for row, weight in zip(sparse.ids_L.tolist(), sparse.weights_L.tolist(), strict=True)
        ]
        shown[feature.name] = [", ".join(words[a:b]) for a, b in pairwise(bounds)]
    cross = [int(row) for row in shown.pop("user_item")]
    assert len({*cross}) == 4
    assert all(0 < row < 1000 for row in cross)
    assert heading == list(shown)
    assert rows == [list(row) for row in zip(*shown.values(), strict=True)]


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
def test_arrays_of_keys_are_wide(tmp_path: Path, vocabulary: str, one_id: Any, tags: Any, seen: Any) -> None:
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


GROWING_TAGS = dataclasses.replace(TAGS, vocabulary="grow(3)")


def test_a_table_grows_as_its_columns(tmp_path: Path) -> None:
    config = rows_config(tmp_path, "grow(2, max_rows = 10000)", tags=GROWING_TAGS)
    train, _ = prepared(config, tmp_path / "cache")
    specs = {table.name: table for table in table_specs(config, train.input_spec)}
    grown = {name: table.growth for name, table in specs.items() if table.num_rows == 0}
    of_data = Growth(admit_after=2, max_rows=10_000)
    assert grown == {"user": of_data, "items": of_data, "user_day": of_data, "tags": Growth(admit_after=3)}
    assert (specs["age"].growth, specs["age"].num_rows) == (None, 4)
    assert specs["user"].init_scale == pytest.approx(1 / 100)
    assert specs["tags"].init_scale == pytest.approx(1 / 1000)
