"""Canonical texts, dates and buckets of the values of a column."""

import decimal
from collections.abc import Sequence
from datetime import UTC, date, datetime
from functools import reduce
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import read

from hybrid.config import ColumnSection, DataSection
from hybrid.data.encode import fitting
from hybrid.data.encode.feature_encoder import SparseEncoding
from hybrid.data.encode.fitting import Quantiles
from hybrid.data.values.canonical import canonical_text, canonicalize, trim_blanks
from hybrid.data.values.column_values import (
    find_digit_dates,
    parse_date_parts,
    parse_labels,
    parse_numbers,
    parse_seconds,
    parse_values,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[(text, "5") for text in ("5", "5.0", "5.00", "5e+00", "5.0E0")],
        *[("1e+06", "1000000"), ("1.5e+07", "15000000"), ("1.50E7", "15000000"), ("-3.0", "-3")],
        *[(text, "0") for text in ("0", "0.0", "-0", "-0.0", "False", "false", "FALSE")],
        *[(text, "1") for text in ("1", "1.0", "True", "true", "TRUE")],
        ("2024-01-31 00:00:00", "2024-01-31"),
        ("2024-01-31T09:30:00.500", "2024-01-31 09:30:00.5"),
        *[(f"2024-01-31 00:00:00{zone}", "2024-01-31 00:00:00Z") for zone in ("+00:00", "+00", " UTC", "Z")],
    ],
)
def test_equivalent_texts_have_one_canonical_text(text: str, expected: str) -> None:
    assert canonical_text(text) == (expected, False)
    assert canonicalize(pa.array(["a", text, None]))[0].to_pylist() == ["a", expected, None]


@pytest.mark.parametrize("blank", [*" \t\n\v\f\r\x1c\x1f", "\x85", "\xa0", "\u3000"])
def test_surrounding_blanks_are_removed(blank: str) -> None:
    texts = pa.array(["b", f"{blank}a{blank}b{blank}", None, "ü"])
    assert trim_blanks(texts).to_pylist() == ["b", f"a{blank}b", None, "ü"]
    assert trim_blanks(texts[:1]).to_pylist() == ["b"]
    assert trim_blanks(pa.array([None, ""], pa.string())).to_pylist() == [None, ""]


@pytest.mark.parametrize(
    "text",
    [
        *("007", "007.0", "1.10", "1.1", "1.0.0", "+5", "5.", ".5", "5e0", "5E0", "12e45678", "00e12345"),
        *("1.5e+00", "1e-07", "nan", "NaN", "inf", "", "a", "1_000", "1,000", "T", "yes", "2024-1-1"),
    ],
)
def test_ambiguous_texts_are_kept(text: str) -> None:
    assert canonical_text(text) == (text, False)


@pytest.mark.parametrize("text", ["9007199254740992.0", "1e+16", "-1.2345678901234568e+18", "1.0E16"])
def test_large_floats_are_inexact(text: str) -> None:
    assert canonical_text(text)[1]
    assert not canonical_text("9007199254740991.0")[1]
    assert canonical_text("9007199254740993") == ("9007199254740993", False)


NOON = datetime(2024, 1, 31, 12)


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array([5, None, -1], pa.int8()), ["5", None, "-1"]),
        (pa.array([5.0, float("nan"), None, -0.0, 1e-7]), ["5", None, None, "0", "1e-07"]),
        (pa.array([5, 0.1], pa.float32()), ["5", "0.1"]),
        (pa.array([True, False, None]), ["1", "0", None]),
        (pa.array([" 5.0 ", "a"], pa.large_string()), ["5", "a"]),
        (pa.array([b"5.0"]), ["5"]),
        (pa.array([decimal.Decimal("5.00"), decimal.Decimal("1.10")]), ["5", "1.10"]),
        (pa.array([date(2024, 1, 31)]), ["2024-01-31"]),
        (pa.array([datetime(2024, 1, 31), NOON]), ["2024-01-31", "2024-01-31 12:00:00"]),
        (pa.array([NOON], pa.timestamp("ns", "UTC")), ["2024-01-31 12:00:00Z"]),
        (pa.array([5.0, 6.0]).dictionary_encode(), ["5", "6"]),
        (pa.nulls(2), [None, None]),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_values_of_every_column_type(column: Any, texts: list[str | None]) -> None:
    coded = parse_values(column, ()).coded
    assert coded.to_pylist() == texts
    assert coded.type.value_type == pa.string()


def test_labels_and_missing_values_use_canonical_texts() -> None:
    found, unknown = parse_labels(pa.array(["1.0", "True", "0", "no"]), ("1",), ("0.0",))
    assert found[:3].tolist() == [1, 1, 0]
    assert unknown.tolist() == [False, False, False, True]
    assert parse_values(pa.array(["-1.0", "-1", "5"]), ("-1",)).coded.to_pylist() == [None, None, "5"]
    assert not parse_values(pa.array(["1e+17"]), ("1e+17",)).inexact_B.any()
    for column in (pa.array(["-999.0", "-999", "1"]), pa.array([-999.0, -999, 1]), pa.array([-999, -999, 1])):
        assert np.isnan(parse_numbers(column, ("", "-999"))[0]).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("text", "separator", "items"),
    [
        *[(text, ",", ["1", "2"]) for text in ("1,2", "[1, 2]", "(1, 2)", "{1,2}", " ['1', \"2.0\"] ")],
        ("[1  2]", " ", ["1", "2"]),
        ("['it''s', 'a b']", ",", ["it''s", "a b"]),
        ("[]", ",", []),
        ("[a],[b]", ",", ["[a]", "[b]"]),
        ("[a]|[b]", "|", ["[a]", "[b]"]),
    ],
)
def test_lists_as_text(text: str, separator: str, items: list[str]) -> None:
    assert parse_values(pa.array([text, "9"]), ("",), separator).coded.to_pylist() == [items, ["9"]]


def test_list_items_are_canonical() -> None:
    found = parse_values(pa.array([[5.0, 2.0**53], None, [float("nan"), 7.5]]), ())
    assert found.coded.to_pylist() == [["5", str(2**53)], [], ["7.5"]]
    assert found.inexact_B.tolist() == [True, False, False]


# The 31st of January 2024 was a Wednesday.
SECONDS = int(datetime(2024, 1, 31, 9, 30, tzinfo=UTC).timestamp())


def check_date_parts(column: Any, hours: list[float], weekdays: list[float], form: str = "") -> None:
    for kind, expected in (("hour", hours), ("weekday", weekdays)):
        found_B, wrong_B = parse_date_parts(column, ("?",), kind, form)
        np.testing.assert_array_equal(found_B, expected)
        assert not wrong_B.any()


@pytest.mark.parametrize(
    ("text", "hour", "weekday"),
    [
        ("2024-01-31", 0, 2),
        (" 2024-01-31 09:30 ", 9, 2),
        ("2024-02-04 23:00:01", 23, 6),
        *((f"2024-01-31T23:59:59{zone}", 23, 2) for zone in ("", "Z", ".5+02:00", "-0800")),
        *((f"2024-02-29 09:30:00.5{zone}", 9, 3) for zone in ("+00", " UTC", " -0800", " Europe/Berlin")),
        (f"{SECONDS}.75", 9, 2),
        ("-1", 23, 2),
    ],
)
def test_hour_and_weekday_of_texts(text: str, hour: int, weekday: int) -> None:
    column = pa.array([text, "?", text])
    for each in (column, column.dictionary_encode(), column.cast("binary")):
        check_date_parts(each, [hour, np.nan, hour], [weekday, np.nan, weekday])


@pytest.mark.parametrize(
    "text",
    [
        *("2024-02-30", "2023-02-29 10:00", "2024-01-31 24:00", "2024-01-31 9:30", "2024-01-31 09:60"),
        *("2024-01-31 09:30.5", "2024-01-31T09:30.5Z"),
        *("31.01.2024", "yesterday", "2024-01-31 09:30 PM", "1706693400000", "nan", "1e12"),
    ],
)
def test_invalid_dates_are_reported(text: str) -> None:
    for kind in ("hour", "weekday"):
        found_B, wrong_B = parse_date_parts(pa.array(["2024-01-31", text]), ("",), kind)
        assert wrong_B.tolist() == [False, True]
        assert np.isnan(found_B).tolist() == [False, True]


def test_hour_and_weekday_of_parquet_types() -> None:
    moment = datetime(2024, 1, 31, 9, 30)
    berlin = moment.replace(tzinfo=UTC).astimezone(ZoneInfo("Europe/Berlin"))
    for column, hour in (
        (pa.array([moment, None], pa.timestamp("us")), 9),
        (pa.array([moment, None], pa.timestamp("s", "UTC")), 9),
        (pa.array([berlin, None], pa.timestamp("s", "Europe/Berlin")), berlin.hour),
        (pa.array([SECONDS, None], pa.int64()), 9),
        (pa.array([float(SECONDS), None], pa.float64()), 9),
        (pa.array([date(2024, 1, 31), None], pa.date32()), 0),
        (pa.array([date(2024, 1, 31), None], pa.date64()), 0),
    ):
        check_date_parts(column, [hour, np.nan], [2, np.nan])


def test_dates_in_digits() -> None:
    for column, form in (
        (pa.array(["14102109", "?", "14102110"]), "%y%m%d%H"),
        (pa.array([2014102109, None, 2014102110]), "%Y%m%d%H"),
        (pa.array([14102109.0, None, 14102110.0]), "%y%m%d%H"),
        (pa.array(["14102109-0500", None, "14102110+1100"]), "%y%m%d%H%z"),
    ):
        check_date_parts(column, [9, np.nan, 10], [1, np.nan, 1], form)
    check_date_parts(pa.array(["14102109.0", "?", "14102110.0"]), [9, np.nan, 10], [1, np.nan, 1], "%y%m%d%H")
    assert find_digit_dates(pa.array(["20170601"]), ()).tolist() == [True]
    texts = pa.array(["noon", "20230230", "20170601"])
    assert parse_date_parts(texts, (), "hour", "%Y%m%d")[1].tolist() == [True, True, False]


@pytest.mark.parametrize("form", ["%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S"])
def test_date_formats_read_the_text_of_the_file(form: str, tmp_path: Path) -> None:
    moments = [datetime(2024, 1, 31, hour) for hour in (0, 9)]
    texts = [f" {moment.strftime(form)}" for moment in moments]
    data = DataSection(format="parquet", sparse=("seen",), max_invalid_fraction=0)
    for seen in (
        pa.array(texts),
        pa.array(texts).dictionary_encode(),
        pa.array(texts, pa.binary()),
        pa.array(moments, pa.timestamp("us")),
        pa.array(moments, pa.timestamp("us")).dictionary_encode(),
    ):
        pq.write_table(pa.table({"label": [0, 1], "seen": seen}), tmp_path / "a.parquet")
        block, _ = read(data, tmp_path / "a.parquet", columns={"seen": ColumnSection(kind=f"hour('{form}')")})
        assert block.sparse[0].to_pylist() == [0, 9]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "date32"])
def test_impossible_parquet_time_is_an_invalid_row(unit: str, tmp_path: Path) -> None:
    kind = pa.date32() if unit == "date32" else pa.timestamp(unit)
    impossible = {"s": 10**14, "ms": 2**62, "us": 2**62, "date32": 2**31 - 1}[unit]
    integers = pa.int32() if unit == "date32" else pa.int64()
    seen = pa.array([0, impossible, -impossible, None], integers).cast(kind)
    pq.write_table(pa.table({"label": [0, 1, 0, 1], "seen": seen}), tmp_path / "a.parquet")
    for columns, split in ((("hour",), {}), ((), {"split": "time(seen)"})):
        data = DataSection(format="parquet", sparse=("seen",), max_invalid_fraction=1.0, **split)  # type: ignore[arg-type]
        sections = {"seen": ColumnSection(kind=columns[0])} if columns else {}
        block, report = read(data, tmp_path / "a.parquet", columns=sections)
        assert block.source_rows_B.tolist() == ([0, 3] if columns else [0])
        lines = [example.partition(" ")[0] for example in report.examples]
        assert lines[:2] == [f"{tmp_path}/a.parquet:{row}:" for row in (2, 3)]


def test_seconds_of_text_and_parquet_are_equal() -> None:
    text = pa.array(["2024-01-31", " 2024-01-31T09:30:00.5Z", "1706693400", "soon", "2024-13-01", None, "?"])
    of_text, wrong = parse_seconds(text, ("", "?"))
    assert wrong.tolist() == [False, False, False, True, True, False, False]
    np.testing.assert_array_equal(of_text, [1706659200, 1706693400.5, 1706693400, *[np.nan] * 4])
    times = pa.array(np.array(["2024-01-31", "2024-01-31T09:30:00.5"], "datetime64[ms]"))
    np.testing.assert_array_equal(parse_seconds(times, ())[0], of_text[:2])


def bounds_of(numbers: npt.ArrayLike, count: int) -> tuple[float, ...]:
    return quantiles_of(np.array_split(np.asarray(numbers, np.float64), 3)).bounds(count)


def quantiles_of(parts: Sequence[npt.NDArray[np.float64]]) -> Quantiles:
    first, *others = map(Quantiles.of, parts)
    return reduce(Quantiles.plus, others, first)


def test_buckets_are_equally_full_but_for_equal_numbers() -> None:
    numbers = np.random.default_rng(0).permutation(np.arange(1200.0))
    assert bounds_of(numbers, 4) == (300, 600, 900)
    sizes = np.diff([0, *np.searchsorted(np.sort(numbers), bounds_of(numbers, 7)), 1200])
    assert set(sizes.tolist()) <= {171, 172}
    assert bounds_of([0.0] * 90 + [1.0] * 5 + [7.0] * 5, 10) == (1.0,)
    assert bounds_of([3.0] * 10, 5) == ()
    assert bounds_of([], 5) == ()


@pytest.mark.parametrize(
    ("bounds", "expected"), [((1.0, 2.0), [1, 1, 2, 2, 3, 3, 0]), ((), [1, 1, 1, 1, 1, 1, 0])]
)
def test_bucket_includes_its_lower_bound(bounds: tuple[float, ...], expected: list[int]) -> None:
    numbers = pa.array([-np.inf, 0.999, 1.0, 1.5, 2.0, 1e300, np.nan])
    rows = SparseEncoding("x", "buckets", 2 + len(bounds), bounds=bounds).encode(numbers)
    assert isinstance(rows, np.ndarray)
    assert rows.dtype == np.int32
    assert rows.tolist() == expected


@pytest.mark.parametrize("sort", [False, True])
def test_quantiles_of_many_numbers_keep_the_error_bound(monkeypatch: pytest.MonkeyPatch, sort: bool) -> None:
    monkeypatch.setattr(fitting, "MAX_KEPT", kept := 4096)
    numbers = np.random.default_rng(1).lognormal(size=200_000)
    if sort:  # the worst order: each block is beyond those before it
        numbers.sort()
    found = quantiles_of(np.array_split(numbers, 41))
    numbers.sort()
    ranks = np.searchsorted(numbers, found.bounds(20)) / len(numbers)
    allowed = len(numbers) / (4 * (kept / 2) ** 2) + 1 / kept
    # What one replacement moves up another mostly moves down: half a step to one side would come near it.
    assert np.abs(ranks - np.arange(1, 20) / 20).max() <= allowed / 4
    assert bounds_of(numbers[:kept], 4) == tuple(numbers[[1024, 2048, 3072]])
