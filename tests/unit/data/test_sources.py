"""Files to parsed rows: formats, lines, missing values, invalid rows with their messages, hostile files."""

import bz2
import dataclasses
import gzip
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from support.hostile import LAYOUTS, TOKENS, read_hostile
from support.samples import fit, located, read, write

from hybrid.config import ColumnSection, DataSection, RunConfig
from hybrid.data.parse import delimited_text, parquet_blocks
from hybrid.data.parse.column_check import check_input_columns
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import STDIN
from hybrid.data.parse.input_files import list_files
from hybrid.data.parse.sources import RawBlock, read_blocks, read_segment, split_files
from hybrid.data.values import invalid_rows
from hybrid.data.values.invalid_rows import InvalidRowLog
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


@pytest.mark.parametrize("num_bytes", [2, 7, 30])
def test_rows_may_be_longer_than_a_segment(tmp_path: Path, num_bytes: int) -> None:
    path = write(tmp_path / "a.csv", "1,2.5,0,Rome\n0,1,,Oslo\n")
    layout = Layout.of(CSV)
    blocks = [b for each in split_files([path], layout, 1, num_bytes) for b in read_segment(each, layout)]
    assert [city for block in blocks for city in block.columns["city"].to_pylist()] == ["Rome", "Oslo"]
    assert not any(block.invalid for block in blocks)


def test_header_quotes_byte_order_mark_and_column_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'\xef\xbb\xbf"city" ; label;note; x;y\n"a;b";1;n;1;2\nc;0;;3;4\n')
    block, _ = read(edit(columns=(), delimiter=";"), path)
    assert block.sparse[0].to_pylist() == ["a;b", "c"]
    np.testing.assert_array_equal(block.dense_BF, [[1, 2], [3, 4]])


def test_each_invalid_row_is_counted_and_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(DataError, match=r"2 of 10 .*a\.csv:9: "):
        read(edit(max_invalid_fraction=0.1), path)


def test_file_without_valid_rows_is_an_error(tmp_path: Path) -> None:
    narrow = write(tmp_path / "narrow.csv", "1;1;1;a\n0;1;1;b\n")
    with pytest.raises(DataError, match=rf"^{narrow}: .*line 1: .*data\.delimiter$"):
        read(CSV, write(tmp_path / "a.csv", "1,1\n0,1,1,b\n"), narrow)
    income = write(tmp_path / "income.csv", ">50K,1,1,a\n" * 20_000)
    with pytest.raises(DataError, match=r"'>50K', .*data\.positive_labels"):
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
        with pytest.raises(DataError, match=rf"{name}: .*data\.format"):
            read(CSV, write(tmp_path / name, content[:-9]))


@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_delimiter_of_several_characters(tmp_path: Path, block_bytes: int) -> None:
    path = write(tmp_path / "a.dat", 'label::city::x\n1::"a::b"::3\n0::c:d::4\n0::e\n')
    data = edit(columns=(), delimiter="::", dense=("x",))
    block, report = read(data, path, block_bytes=block_bytes)
    assert block.sparse[0].to_pylist() == ["a::b", "c:d"]
    assert block.dense_BF[:, 0].tolist() == [3, 4]
    assert located(report, path) == ["4: 2 columns, expected 3"]


@pytest.mark.parametrize("num_blank", [99, 100, 5000])
def test_header_after_blank_lines(tmp_path: Path, num_blank: int) -> None:
    """Columns are found by their names, although their order differs from that of the configuration."""
    path = write(tmp_path / "a.csv", "\n" * num_blank + "y,label,city,x\n2,1,a,1\n4,0,b,3\n")
    block, report = read(edit(columns=()), path)
    assert block.dense_BF.tolist() == [[1, 2], [3, 4]]
    assert block.sparse[0].to_pylist() == ["a", "b"]
    assert report.total == 0


@pytest.mark.parametrize("num_blank", [(1 << 20) - 7, 1 << 20])
def test_header_beyond_the_first_bytes_is_refused(tmp_path: Path, num_blank: int) -> None:
    """A header that the limit cuts would have another last column."""
    path = write(tmp_path / "a.csv", "\n" * num_blank + "label,x,y,city\n1,2,3,a\n")
    with pytest.raises(DataError, match=rf"^{path}: has no header line in its first 1 MiB"):
        read(edit(columns=(), dense=(), sparse=("x",)), path)


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
    check_input_columns(RunConfig(data=data))
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
    with pytest.raises(DataError, match=r"a\.parquet: .*data\.format"):
        read(edit(format="parquet"), text)


FILES = st.lists(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=4)), max_size=40).map(b"".join)
MANY = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@MANY
@given(raw=FILES, data=st.sampled_from(LAYOUTS), with_labels=st.booleans())
@example(raw=b'\n\xef\xbb\xbf"\nc\n', data=LAYOUTS[1], with_labels=True)
def test_a_file_is_read_or_refused(raw: bytes, data: DataSection, with_labels: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(raw)
    whole = read_hostile(path, data, with_labels, 1 << 20)
    in_pieces = read_hostile(path, data, with_labels, 7)
    if raw[:2] != b"\x1f\x8b":
        assert whole == in_pieces


@MANY
@given(raw=FILES, cut=st.integers(0, 200), flipped=st.integers(0, 200))
def test_broken_archive_is_read_or_refused(raw: bytes, cut: int, flipped: int, tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(raw)[: cut or None])
    if flipped < len(packed):
        packed[flipped] ^= 0x40
    path = tmp_path / "file.gz"
    path.write_bytes(packed)
    read_hostile(path, LAYOUTS[0], True, 1 << 20)


@pytest.mark.parametrize("data", LAYOUTS, ids=["header", "columns", "criteo"])
def test_byte_order_mark_within_a_file_belongs_to_its_line(data: DataSection, tmp_path: Path) -> None:
    path = tmp_path / "file"
    mark, good = b"\xef\xbb\xbf", {"csv": b"1,2,a,b\n", "criteo": TOKENS[-1]}[data.format]
    header = b"" if data.columns or data.format == "criteo" else b"label,x,city,tags\n"
    path.write_bytes(mark + header + good + b"\n" + mark + good + good)
    read = read_hostile(path, data, True, len(mark + header + good) + 1)
    assert read is not None
    report, rows = read
    assert (rows, report.total) == ([0, 2], 1)  # the label of the second is none


PARTS = [*"ab:|? é\x1fZ", "0.5", "-1", "1e999", "nan", "inf", "1e+17", "0x1p3", "9" * 40, ".5", "1706693400"]
PARTS += ["2024-01-31", "2024-02-30", "T09:30", " 24:00", "+02:00", "0000-00-00", "9999-12-31"]
FIELDS = st.lists(st.sampled_from(PARTS), max_size=5).map("".join)
COLUMNS = {
    "bucket": ColumnSection(kind="quantiles(3)", source=("a",)),
    "hour": ColumnSection(kind="hour", source=("a",)),
    "day": ColumnSection(kind="weekday", source=("b",)),
    "both": ColumnSection(kind="cross", source=("a", "b")),
    "bags": ColumnSection(kind="weighted", source=("b",), multi_hot_separator="|", max_ids=2),
    "one": ColumnSection(kind="weighted", source=("a",), max_ids=1, too_many_ids="keep_last"),
}


@settings(MANY, max_examples=20)
@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS), max_size=8),
    kinds=st.sets(st.sampled_from([*COLUMNS]), min_size=1),
)
def test_hostile_fields_of_all_kinds(rows: list[tuple[str, str]], kinds: set[str], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("label,a,b\n" + "".join(f"1,{a},{b}\n" for a, b in rows))
    data = DataSection(format="csv", sparse=tuple(sorted(kinds)), max_invalid_fraction=1.0)
    columns = {name: COLUMNS[name] for name in kinds}
    whole = read_hostile(path, data, True, 1 << 20, columns)
    assert whole == read_hostile(path, data, True, 7, columns)
    if whole is not None and whole[1]:
        fit(read_blocks((path,), Layout.of(data, columns), InvalidRowLog(1.0)), data, columns)


PARQUET = DataSection(format="parquet", sparse=("city",), max_invalid_fraction=1.0)
MILLION = 1_000_000


def count_blocks(path: Path, layout: Layout) -> int:
    return len(list(read_blocks([path], layout, InvalidRowLog(1.0))))


def zero_one(num_rows: int) -> pa.Array:
    return pa.array(np.arange(num_rows) % 2)


def long_text() -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(MILLION, np.int32)), pa.array(["x" * 40_000]))


def long_list() -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, 20 * MILLION]), pa.nulls(20 * MILLION, pa.int8()))


def long_items() -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.arange(MILLION + 1, dtype=np.int32)), long_text())


def memory(name: str) -> int:
    """Return a number of KiB from the status of this process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))


def test_small_parquet_files_take_little_memory(tmp_path: Path) -> None:
    too_long, too_many = "at most 4,096 bytes", "claims 20,000,00[01] values"
    for name, cities, message in (
        ("text", long_text(), too_long),
        ("list", long_list(), too_many),
        ("items", long_items(), too_long),
    ):
        path = tmp_path / name
        pq.write_table(pa.table({"label": zero_one(len(cities)), "city": cities}), path, store_schema=False)
        assert path.stat().st_size < 20_000
        pa.default_memory_pool().release_unused()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before = memory("VmRSS")
        with pytest.raises(DataError, match=f"^{path}: .*{message}"):
            count_blocks(path, Layout.of(PARQUET))
        assert memory("VmHWM") - before < 100_000


def test_blocks_are_limited_by_decoded_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_blocks, "MAX_DECODED_BYTES", 100)
    cities = [f"{i:02}" * (1 + i % 5) for i in range(80)]
    tags = [[city, "x" * (i % 3)] if i % 4 else None for i, city in enumerate(cities)]
    table = pa.table({"label": [*zero_one(80).to_pylist(), 2], "city": [*cities, "b"], "tags": [*tags, None]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=33)
    data = DataSection(format="parquet", sparse=("city", "tags"))
    assert count_blocks(path, Layout.of(data)) > 5
    block, report = read(data, path)
    assert located(report, path) == ["81: label is '2', expected '1' or '0'"]
    assert block.sparse[0].to_pylist() == cities
    assert block.sparse[1].to_pylist() == [[item for item in items or [] if item] for items in tags]
    assert block.source_rows_B.tolist() == list(range(80))
    monkeypatch.setattr(parquet_blocks, "MAX_DECODED_BYTES", 5)
    with pytest.raises(DataError, match=r"a\.parquet: .* column city"):
        read(data, path)


@pytest.mark.parametrize("is_map", [True, False])
def test_texts_in_pairs_limit_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_map: bool) -> None:
    monkeypatch.setattr(parquet_blocks, "MAX_DECODED_BYTES", 100)
    expected = [[(f"{i:02}" * (1 + i % 5), float(i)), ("x", 1.0)][: i % 3] for i in range(80)]
    pairs: list[Any] = [row if i % 2 else row or None for i, row in enumerate(expected)]
    kind: Any = pa.map_(pa.string(), pa.float64())
    if not is_map:
        kind = pa.list_(pa.struct([("id", pa.string()), ("weight", pa.float64())]))
        pairs = [row and [{"id": each, "weight": weight} for each, weight in row] for row in pairs]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": zero_one(80), "tags": pa.array(pairs, kind)}), path, row_group_size=33)
    data, columns = DataSection(format="parquet", sparse=("tags",)), {"tags": ColumnSection(kind="weighted")}
    assert count_blocks(path, Layout.of(data, columns)) > 3  # as many row groups there are
    block, _ = read(data, path, columns=columns)
    assert block.sparse[0].to_pylist() == [[each for each, _ in row] for row in expected]
    assert block.weights[0].to_pylist() == [[weight for _, weight in row] for row in expected]
    monkeypatch.setattr(parquet_blocks, "MAX_DECODED_BYTES", 5)
    with pytest.raises(DataError, match=r"a\.parquet: .* column tags"):
        read(data, path, columns=columns)


def test_implausible_compression_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"label": zero_one(MILLION), "city": np.zeros(MILLION, np.int64)})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    read(PARQUET, path)
    monkeypatch.setattr(parquet_blocks, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"column (city|label) .* 8,\d+,\d+ bytes"):
        read(PARQUET, path)
    wide = pa.table({"label": zero_one(2), "city": pa.array([b"a" * 5000] * 2, pa.binary(5000))})
    pq.write_table(wide, path)
    with pytest.raises(DataError, match=r"column city .* 4,096 bytes"):
        read(PARQUET, path)


def test_duplicate_column_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = [zero_one(4), pa.array(["a"] * 4), pa.array(["b"] * 4)]
    pq.write_table(pa.Table.from_arrays(columns, ["label", "city", "city"]), path)
    with pytest.raises(DataError, match=r"a\.parquet: .* 2 and 3 .*'city'"):
        read(PARQUET, path)
    pq.write_table(pa.Table.from_arrays([*columns, columns[1]], ["label", "city", "x", "x"]), path)
    read(PARQUET, path)
    text = write(tmp_path / "a.csv", "label,city,city\n1,a,b\n")
    with pytest.raises(DataError, match=r"a\.csv: .* 2 and 3 .*'city'"):
        read(DataSection(format="csv", sparse=("city",)), text)


LINES = edit(columns=("label", "x", "city"), dense=("x",))
TWO_BREAKS = '1,1,a\n1,2,"first\n0,3,second"\n0,4,"x, ""y"" z"\n1,5,"three\n\n0,6,lines"\n0,7,b'
BREAKS = {2: "a line break within quotes, to line 3", 5: "a line break within quotes, to line 7"}
OPEN = "a quote is not closed"
RETURN = "a carriage return within the line"


@pytest.mark.parametrize("block_bytes", [1, 7, 30, 1 << 20])
@pytest.mark.parametrize(
    ("text", "cities", "invalid"),
    [
        (TWO_BREAKS, {0: "a", 3: 'x, "y" z', 6: "b"}, BREAKS),
        (TWO_BREAKS.replace("\n", "\r\n"), {0: "a", 3: 'x, "y" z', 6: "b"}, BREAKS),
        ('1,1,a\n1,2,"open\n0,3,"b"\n1,4,c', {0: "a", 2: "b", 3: "c"}, {2: OPEN}),
        ('1,1,a\n1,2,"open\n0,3,5" pipe\n1,4,c', {0: "a", 2: '5" pipe', 3: "c"}, {2: OPEN}),
        ('1,1,a\n1,2,"open\n0,3,"b\n1,4,c', {0: "a", 3: "c"}, {2: OPEN, 3: OPEN}),
        ('1,1,a\n1,2,"open\n0,3,b"\n1,4,c', {0: "a", 3: "c"}, {2: BREAKS[2]}),
        ('1,1,a\n1,2,"open', {0: "a"}, {2: OPEN}),
        ('1,1,5" pipe\n0,2,"6"" pipe"\n', {0: '5" pipe', 1: '6" pipe'}, {}),
        (
            '1,1,a\r\r\n1,2,b\rc\n0,3,d\r\n1,4,"e\rf"\n0,5,g\r',
            {0: "a", 2: "d", 4: "g"},
            {2: RETURN, 4: RETURN},
        ),
        ('1,1,a\n1,2,"b\rc" \n0,3,d\n', {0: "a", 2: "d"}, {2: RETURN}),
        ("1,1,a\n1,2,b\r \n0,3,d\n", {0: "a", 2: "d"}, {2: RETURN}),
        ("1,1,a\n\r1,2,b \n0,3,d\n", {0: "a", 2: "d"}, {2: RETURN}),
    ],
)
def test_stray_quotes_and_returns_invalidate_only_their_rows(
    tmp_path: Path, text: str, cities: dict[int, str], invalid: dict[int, str], block_bytes: int
) -> None:
    path = write(tmp_path / "a.csv", text)
    block, report = read(LINES, path, block_bytes=block_bytes)
    assert dict(zip(block.source_rows_B.tolist(), block.sparse[0].to_pylist(), strict=True)) == cities
    assert located(report, path) == [f"{line}: {reason}" for line, reason in invalid.items()]
    assert report.counts["broken_text"] == report.total == len(invalid)


def test_carriage_returns_as_line_ends_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "label,x,city\r1,1,a\r0,2,b\r")
    with pytest.raises(DataError, match=r"a\.csv:1: .*carriage return"):
        read(DataSection(format="csv", sparse=("city",)), path)
    with pytest.raises(DataError, match=r"line 1: .*carriage return"):
        read(LINES, path)


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04\x14\0\0\0\x08\0abc\nde,f",
        b"\xfd7zXZ\0",
        "label,x,city\n".encode("utf-16"),
        b"1,2,a\n1,2,\0\n",
        gzip.compress(b"PK\x03\x04", mtime=0),
    ],
)
@pytest.mark.parametrize("columns", [(), ("label", "x", "city")])
def test_binary_formats_are_refused(tmp_path: Path, content: bytes, columns: tuple[str, ...]) -> None:
    path = write(tmp_path / "a.csv", content)
    with pytest.raises(DataError, match=r"a\.csv: .* data\.format") as raised:
        read(DataSection(format="csv", columns=columns, sparse=("city",)), path)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("start", [0, 9, 17])
def test_too_long_line_is_refused(start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited_text, "MAX_LINE_BYTES", 20)
    for length in (20, 21):
        path = write(tmp_path / "a.csv", b"\n" * start + b"1,2,%b\n" % (b"a" * (length - 4)))
        with nullcontext() if length == 20 else pytest.raises(DataError, match="a line is longer"):
            read(LINES, path, block_bytes=20)


NOTED = DataSection(format="csv", dense=("x",), sparse=("city",), max_invalid_fraction=1.0)
ROWS = """\ufeffx,city,note\r
1,Rome,a
much,Oslo,b

2,"Oslo, east",c
3,"a
break",d
4,Rome
5,"open,f
-6,Oslo,é
"""


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    """Return ``text`` in chunks of ``size`` bytes."""
    return (text[i : i + size] for i in range(0, len(text), size))


def streamed(
    text: Iterator[bytes], data: DataSection = NOTED, log: InvalidRowLog | None = None
) -> Iterator[RawBlock]:
    """Yield the rows of a stream, with the column "note" as it is."""
    layout = Layout.of(data, with_labels=False, passthrough=(("--keep", "note"),))
    return read_blocks((STDIN,), layout, log or InvalidRowLog(1.0), text=text)


@pytest.mark.parametrize("size", [3, 4, 17, 1 << 20])
def test_stream_equals_file_for_any_chunk_size(tmp_path: Path, size: int) -> None:
    expected, of_file = read(NOTED, write(tmp_path / "a.csv", ROWS), with_labels=False)
    log = InvalidRowLog(1.0)
    blocks = list(streamed(pieces(ROWS.encode(), size), log=log))
    found = np.concatenate([block.dense_BF for block in blocks])
    np.testing.assert_array_equal(found, expected.dense_BF)
    cities = pa.concat_arrays([block.sparse[0] for block in blocks])
    assert cities.to_pylist() == expected.sparse[0].to_pylist() == ["Rome", "Oslo, east", "Oslo"]
    numbers = np.concatenate([block.source_rows_B for block in blocks]).tolist()
    assert numbers == expected.source_rows_B.tolist() == [0, 2, 7]
    assert [note for block in blocks for note in block.passthrough["note"].to_pylist()] == ["a", "c", "é"]
    of_stream = log.finish()
    assert of_stream.counts == of_file.counts
    assert [e.replace(str(STDIN), str(tmp_path / "a.csv")) for e in of_stream.examples] == [*of_file.examples]


@pytest.mark.parametrize(
    ("text", "message"),
    [(gzip.compress(b"x,city,note\n1,Rome,a\n", mtime=0), "compressed"), (b"PAR1\0\n", "not text")],
)
def test_stream_without_plain_text_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^standard input: .*{message}"):
        list(streamed(pieces(text, 7)))
