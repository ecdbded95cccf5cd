"""Hostile files give rows or one clear error, for any block size."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from support.hostile import LAYOUTS, TOKENS, read_hostile
from support.samples import fit

from hybrid.config import ColumnSection, DataSection
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import read_blocks
from hybrid.data.values.invalid_rows import InvalidRowLog

FILES = st.lists(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=4)), max_size=40).map(b"".join)
MANY = settings(
    max_examples=75,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@MANY
@given(raw=FILES, data=st.sampled_from(LAYOUTS), with_labels=st.booleans())
@example(raw=b'\n\xef\xbb\xbf"\nc\n', data=LAYOUTS[1], with_labels=True)
def test_hostile_file_is_read_or_refused(
    raw: bytes, data: DataSection, with_labels: bool, tmp_path: Path
) -> None:
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
def test_hostile_fields_of_every_column_kind(
    rows: list[tuple[str, str]], kinds: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("label,a,b\n" + "".join(f"1,{a},{b}\n" for a, b in rows))
    data = DataSection(format="csv", sparse=tuple(sorted(kinds)), max_invalid_fraction=1.0)
    columns = {name: COLUMNS[name] for name in kinds}
    whole = read_hostile(path, data, True, 1 << 20, columns)
    assert whole == read_hostile(path, data, True, 7, columns)
    if whole is not None and whole[1]:
        fit(read_blocks((path,), Layout.of(data, columns), InvalidRowLog(1.0)), data, columns)
