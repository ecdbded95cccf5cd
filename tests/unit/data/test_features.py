"""Columns of data.sparse of every kind, from text and from Parquet, and their invalid rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import fit, located, read, write

from hybrid.config import ColumnSection, DataSection, TableSection
from hybrid.data.encode.feature_encoder import EncodedBags, FeatureEncoder
from hybrid.data.values.canonical import hash_texts
from hybrid.errors import ConfigError, DataError

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


def test_bucket_and_date_columns(tmp_path: Path) -> None:
    times = ["2024-01-31 09:30", "2024-02-04 23:00:01", "?", "?", "?", "?"]
    numbers = ["17", "18", "64.5", "-3", "?", "1e3"]
    rows = [f"{i % 2},{x},{time}\n" for i, (x, time) in enumerate(zip(numbers, times, strict=True))]
    path = write(tmp_path / "a.csv", "label,age,time\n" + "".join(rows))
    columns = {
        "age": ColumnSection(kind="buckets(18.0, 65.0)"),
        "half": ColumnSection(kind="quantiles(2)", source=("age",)),
        "hour": ColumnSection(kind="hour", source=("time",)),
        "day": ColumnSection(kind="weekday", source=("time",)),
    }
    encoder, (age, half, hour, day), _ = encoded(path, data_of("age half hour day"), columns)
    assert age == [1, 2, 2, 1, 0, 3]
    assert encoder.sparse[1].bounds == (18.0,)
    assert half == [1, 2, 2, 1, 0, 2]
    assert (hour[:3], day[:3]) == ([10, 24, 0], [3, 7, 0])  # one more than the hour, and than the day
    assert [feature.num_rows for feature in encoder.input_spec.sparse_features] == [4, 3, 25, 8]


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
    assert tags.lengths_B.tolist() == [2, 0, 0, 1, 2, 1]
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
    assert (letters, seen.lengths_B.tolist()) == (f"{kept}abcab", [3, 2, 0, 3])
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
        (ColumnSection(kind="cross", source=("tags", "n")), "column tags holds list<"),
        (ColumnSection(kind="weighted", source=("n",)), "found int64"),
        (ColumnSection(kind="buckets(1.0)", source=("tags",)), r"column tags .*columns\.x\.source"),
    ):
        with pytest.raises(DataError, match=f"^{path}: .*{message}"):
            read(data, path, columns={"x": section})
    with pytest.raises(ConfigError, match=r"^columns\.x\.source = 'tag': "):
        read(data, path, columns={"x": ColumnSection(source=("tag",))})


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
