"""Files to parsed rows: formats, missing values, invalid rows and their messages."""

import bz2
import dataclasses
import gzip
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import located, read, write

from hybrid.config import DataSection, RunConfig
from hybrid.data.parse.column_check import check_columns
from hybrid.data.parse.input_files import list_files
from hybrid.data.values import invalid_rows
from hybrid.errors import ConfigError, DataError

CSV = DataSection(
    format="csv",
    columns=("label", "x", "y", "city"),
    dense=("x", "y"),
    sparse=("city",),
    max_invalid_fraction=1.0,
)
edit = partial(dataclasses.replace, CSV)


def test_csv_strips_blanks_and_recognizes_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "1, 2.5, ?, Rome \r\n\r\n         \r\n0, -1e3,, ?\n0, +4, .5, Oslo")
    block, report = read(CSV, path)
    np.testing.assert_array_equal(block.dense_BF, [[2.5, np.nan], [-1e3, np.nan], [4.0, 0.5]])
    assert block.sparse[0].to_pylist() == ["Rome", None, "Oslo"]
    assert block.targets is not None
    assert block.targets.labels_BT.tolist() == [[1], [0], [0]]
    assert block.source_rows_B.tolist() == [0, 1, 2]
    assert report.total == 0


def test_header_quotes_byte_order_mark_and_column_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'\xef\xbb\xbf"city" ; label;note; x;y\n"a;b";1;n;1;2\nc;0;;3;4\n')
    block, _ = read(edit(columns=(), delimiter=";"), path)
    assert block.sparse[0].to_pylist() == ["a;b", "c"]
    np.testing.assert_array_equal(block.dense_BF, [[1, 2], [3, 4]])


def test_every_kind_of_invalid_row_is_counted_and_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invalid_rows, "MAX_EXAMPLES", 12)
    lines = [b"1,1,1,12345678901234567", b"1,1,1", b"yes,1,1,a", b"1,abc,1,a", b"1,1,nan,a", b"1,1,1e999,a"]
    lines += [b"1,0x10,1,a", b'1,1,1,"open', b"0,2,2," + b"a" * 4096, b"1,1,1,\xff\xfe", b"\xff", b""]
    lines += [b"1,1,1," + b"b" * 4097, b"1,1,1,1.2345678901234568e+16", b"1", b"0,3,3,5.0"]
    path = write(tmp_path / "a.csv", b"\n".join(lines))
    block, report = read(CSV, path)
    assert block.dense_BF[:, 0].tolist() == [1, 2, 3]
    assert block.sparse[0].to_pylist() == ["12345678901234567", "a" * 4096, "5"]
    assert block.source_rows_B.tolist() == [0, 8, 14]
    counts = {"wrong_column_count": 2, "unknown_label": 1, "not_a_number": 4, "broken_text": 3}
    counts |= {"inexact_id": 1, "too_long_value": 1}
    assert {reason: count for reason, count in report.counts.items() if count} == counts
    assert located(report, path) == [
        "2: 3 columns, expected 4",
        "3: label is 'yes', expected '1' or '0'",
        "4: x is 'abc', expected a finite number",
        "5: y is 'nan', expected a finite number",
        "6: y is '1e999', expected a finite number",
        "7: x is '0x10', expected a finite number",
        "8: a quote is not closed",
        "10: not UTF-8 text",
        "11: not UTF-8 text",
        f"13: city is '{'b' * 60}'... (4,097 characters), expected at most 4,096 bytes",
        "14: city is '1.2345678901234568e+16', expected an id that a float holds exactly",
        "15: 1 column, expected 4",
    ]


def test_too_many_invalid_rows_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "1,1,1,a\n" * 8 + "1\n2\n")
    read(edit(max_invalid_fraction=0.2), path)
    with pytest.raises(DataError, match=r"2 of 10 .*a\.csv:9: 1 col"):
        read(edit(max_invalid_fraction=0.1), path)


def test_file_without_valid_rows_is_an_error(tmp_path: Path) -> None:
    narrow = write(tmp_path / "narrow.csv", "1;1;1;a\n0;1;1;b\n")
    with pytest.raises(DataError, match=rf"^{narrow}: no valid row .*line 1: 1 column, .*data\.delimiter$"):
        read(CSV, write(tmp_path / "a.csv", "1,1\n0,1,1,b\n"), narrow)
    income = write(tmp_path / "income.csv", ">50K,1,1,a\n" * 20_000)
    with pytest.raises(DataError, match=r"label is '>50K', .*data\.positive_labels"):
        read(CSV, income, block_bytes=1000)


def test_labels_are_optional_only_for_prediction(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "1,2,Rome\n3,4,Oslo\n")
    block, _ = read(CSV, path, with_labels=False)
    assert block.targets is None
    np.testing.assert_array_equal(block.dense_BF, [[1, 2], [3, 4]])
    with pytest.raises(DataError, match="3 columns"):
        read(CSV, path)
    labelled = write(tmp_path / "b.csv", "junk,1,2,Rome\n")
    assert read(CSV, labelled, with_labels=False)[0].dense_BF.tolist() == [[1, 2]]


def test_criteo_reads_gzip_negative_huge_and_empty_fields(tmp_path: Path) -> None:
    numbers = ["-3", "", "123456789012345", *["0"] * 10]
    line = "\t".join(["1", *numbers, 'a"b', "", *["68fd1e64"] * 24]) + "\n"
    path = write(tmp_path / "day_0.csv", gzip.compress(line.encode() * 3))
    block, report = read(DataSection(format="criteo"), path)
    assert block.dense_BF.shape == (3, 13)
    np.testing.assert_array_equal(block.dense_BF[0, :3], [-3, np.nan, 123456789012345])
    assert [column[0].as_py() for column in block.sparse[:3]] == ['a"b', None, "68fd1e64"]
    assert report.total == 0


def test_compressed_text(tmp_path: Path) -> None:
    text = b"1,1,1,a\n0,2,2,b\n" * 9
    packed = {"bz2": bz2.compress(text) * 2, "zst": pa.compress(text, "zstd", asbytes=True) * 2}
    for name, content in {**packed, "gz": gzip.compress(text) * 2}.items():
        block, _ = read(CSV, write(tmp_path / name, content), block_bytes=11)
        assert block.dense_BF[:, 0].tolist() == [1, 2] * 18
        with pytest.raises(DataError, match=rf"{name}: cannot be read .*data\.format"):
            read(CSV, write(tmp_path / name, content[:-9]))


@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_delimiter_of_several_characters(tmp_path: Path, block_bytes: int) -> None:
    path = write(tmp_path / "a.dat", 'label::city::x\n1::"a::b"::3\n0::c:d::4\n0::e\n')
    data = edit(columns=(), delimiter="::", dense=("x",))
    block, report = read(data, path, block_bytes=block_bytes)
    assert block.sparse[0].to_pylist() == ["a::b", "c:d"]
    assert block.dense_BF[:, 0].tolist() == [3, 4]
    assert located(report, path) == ["4: 2 columns, expected 3"]


@pytest.mark.parametrize(
    ("file_format", "empty"),
    [("csv", b""), ("csv", b"\n"), ("csv", gzip.compress(b"", mtime=0)), ("parquet", b"")],
)
def test_empty_files_beside_others_have_no_rows(tmp_path: Path, file_format: str, empty: bytes) -> None:
    """Spark writes them."""
    data = edit(format=file_format, columns=(), path=(str(tmp_path),))
    for i in (0, 2):
        write(tmp_path / f"{i}", empty)
    if file_format == "csv":
        write(tmp_path / "1", "city,x,label,y\na,1,1,2\n")
    else:
        pq.write_table(pa.table({"city": ["a"], "x": [1], "label": [1], "y": [2]}), tmp_path / "1")
    check_columns(RunConfig(data=data))
    assert read(data, tmp_path)[0].dense_BF.tolist() == [[1, 2]]


def test_files_and_folders_are_read_in_order(tmp_path: Path) -> None:
    for name, value in [("b.csv", 2), ("a.csv", 1), (".hidden", 9), ("_SUCCESS", 9)]:
        write(tmp_path / name, f"1,{value},0,a\n\nbad\n")
    block, report = read(CSV, tmp_path, tmp_path / "a.csv")
    assert block.dense_BF[:, 0].tolist() == [1, 2, 1]
    assert block.source_rows_B.tolist() == [0, 2, 4]
    assert report.counts["wrong_column_count"] == 3


def test_parquet_of_many_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "label": [True, False, True, None],
            "x": pa.array([1, None, 3, 4], pa.int32()),
            "y": pa.array(["2.5", "", "bad", "1"]),
            "city": pa.array([7.0, float("nan"), 8.5, 1.0]),
            "kind": pa.array(["a", None, "b", "c"]).dictionary_encode(),
            "tags": pa.array([[1, 2], None, [3], []], pa.list_(pa.int64())),
        }
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    block, report = read(edit(format="parquet", sparse=("city", "kind", "tags")), path)
    np.testing.assert_array_equal(block.dense_BF, [[1, 2.5], [np.nan, np.nan]])
    assert [column.to_pylist() for column in block.sparse] == [["7", None], ["a", None], [["1", "2"], []]]
    assert located(report, path) == [
        "3: y is 'bad', expected a finite number",
        "4: label is 'None', expected '1' or '0'",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense": ("x", "yy")}, "data.dense = 'yy'"),
        ({"sparse": ("town",)}, "data.sparse = 'town'"),
        ({"label": "lable"}, "data.label = 'lable'"),
        ({"columns": (), "label": "1"}, "data.dense = 'x'"),
        ({"negative_labels": ("0", "1.0")}, "data.negative_labels = '1.0'"),
        ({"positive_labels": ()}, "data.positive_labels"),
        ({"columns": ("label", "x", "x", "y", "city")}, "data.columns = 'x'"),
        ({"sparse": ("city", "city")}, "data.sparse = ('city', 'city')"),
        ({"sparse": ("label",)}, "data.sparse = 'label'"),
        ({"dense": (), "sparse": ()}, "data.sparse"),
    ],
)
def test_contradictory_keys_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.csv", "1,1,1,a\n")
    with pytest.raises(ConfigError) as caught:
        read(edit(**changes), path)
    assert str(caught.value).startswith(f"{message}: ")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path: "):
        list_files((), "data.path")
    with pytest.raises(DataError, match=r"gone\.csv: .*data\.test_path$"):
        list_files((str(tmp_path / "gone.csv"),), "data.test_path")
    with pytest.raises(DataError):
        list_files((str(tmp_path),), "data.path")
    text = write(tmp_path / "a.parquet", "1,1,1,a\n")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read .*data\.format"):
        read(edit(format="parquet"), text)
