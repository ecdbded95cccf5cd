"""Canonical texts, dates and buckets of the values of a column."""

import decimal
from datetime import UTC, date, datetime
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
from hybrid.data.values import scaling
from hybrid.data.values.canonical import canonical, canonical_text, trimmed
from hybrid.data.values.column_values import labels, numbers, values
from hybrid.data.values.dates import parts_of_dates, seconds
from hybrid.data.values.scaling import Quantiles, bucket_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[(text, "5") for text in ("5", "5.0", "5.00", "5e+00", "5.0E0")],
        *[("1e+06", "1000000"), ("1.5e+07", "15000000"), ("1.50E7", "15000000"), ("-3.0", "-3")],
        *[(text, "0") for text in ("0", "0.0", "-0", "-0.0", "False", "false", "FALSE")],
        *[(text, "1") for text in ("1", "1.0", "True", "true", "TRUE")],
        ("2024-01-31 00:00:00", "2024-01-31"),
        ("2024-01-31T09:30:00.500", "2024-01-31 09:30:00.5"),
        ("2024-01-31 00:00:00+00:00", "2024-01-31 00:00:00Z"),
    ],
)
def test_equivalent_texts_have_one_canonical_text(text: str, expected: str) -> None:
    assert canonical_text(text) == (expected, False)
    assert canonical(pa.array(["a", text, None]))[0].to_pylist() == [
        "a",
        expected,
        None,
    ]  # nothing else to see


@pytest.mark.parametrize("blank", [*" \t\n\v\f\r\x1c\x1f", "\x85", "\xa0", "\u3000"])
def test_surrounding_blanks_are_removed(blank: str) -> None:
    texts = pa.array(["b", f"{blank}a{blank}b{blank}", None, "ü"])
    assert trimmed(texts).to_pylist() == ["b", f"a{blank}b", None, "ü"]
    assert trimmed(texts[:1]).to_pylist() == ["b"]
    assert trimmed(pa.array([None, ""], pa.string())).to_pylist() == [None, ""]


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
        (pa.array([2**64 - 1], pa.uint64()), [str(2**64 - 1)]),
        (pa.array([5.0, float("nan"), None, -0.0, 1e-7]), ["5", None, None, "0", "1e-07"]),
        (pa.array([5, 0.1], pa.float32()), ["5", "0.1"]),
        (pa.array(np.array([5, 0.5], np.float16)), ["5", "0.5"]),
        (pa.array([True, False, None]), ["1", "0", None]),
        (pa.array([" 5.0 ", "a"], pa.large_string()), ["5", "a"]),
        (pa.array([b"5.0"]), ["5"]),
        (pa.array([decimal.Decimal("5.00"), decimal.Decimal("1.10")]), ["5", "1.10"]),
        (pa.array([decimal.Decimal(2**60)], pa.decimal128(30, 2)), [str(2**60)]),
        (pa.array([date(2024, 1, 31)]), ["2024-01-31"]),
        (pa.array([datetime(2024, 1, 31), NOON]), ["2024-01-31", "2024-01-31 12:00:00"]),
        (pa.array([NOON], pa.timestamp("ns", "UTC")), ["2024-01-31 12:00:00Z"]),
        (pa.array([5.0, 6.0]).dictionary_encode(), ["5", "6"]),
        (pa.nulls(2), [None, None]),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_values_of_every_column_type(column: Any, texts: list[str | None]) -> None:
    coded = values(column, ()).coded
    assert coded.to_pylist() == texts
    assert coded.type.value_type == pa.string()


def test_labels_and_missing_values_use_canonical_texts() -> None:
    found, unknown = labels(pa.array(["1.0", "True", "0", "no"]), ("1",), ("0.0",))
    assert found[:3].tolist() == [1, 1, 0]
    assert unknown.tolist() == [False, False, False, True]
    assert values(pa.array(["-1.0", "-1", "5"]), ("-1",)).coded.to_pylist() == [None, None, "5"]
    for column in (pa.array(["-999.0", "-999", "1"]), pa.array([-999.0, -999, 1]), pa.array([-999, -999, 1])):
        assert np.isnan(numbers(column, ("", "-999"))[0]).tolist() == [True, True, False]


def test_list_items_are_canonical() -> None:
    found = values(pa.array([[5.0, 2.0**53], None, [float("nan"), 7.5]]), ())
    assert found.coded.to_pylist() == [["5", str(2**53)], [], ["7.5"]]
    assert found.inexact_B.tolist() == [True, False, False]


# The 31st of January 2024 was a Wednesday.
SECONDS = int(datetime(2024, 1, 31, 9, 30, tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    ("text", "hour", "weekday"),
    [
        ("2024-01-31", 0, 2),
        (" 2024-01-31 09:30 ", 9, 2),
        ("2024-01-31T23:59:59", 23, 2),
        ("2024-01-31 09:30:00.123456789", 9, 2),
        ("2024-01-31T09:30:00Z", 9, 2),
        ("2024-01-31T09:30:00.5+02:00", 9, 2),
        ("2024-01-31T09:30:00-0800", 9, 2),
        ("2024-02-29 00:00:00", 0, 3),
        (str(SECONDS), 9, 2),
        (f"{SECONDS}.75", 9, 2),
        ("0", 0, 3),
        ("-1", 23, 2),
    ],
)
def test_hour_and_weekday_of_texts(text: str, hour: int, weekday: int) -> None:
    column = pa.array([text, "?", text])
    for kind, expected in (("hour", hour), ("weekday", weekday)):
        for each in (column, column.dictionary_encode()):
            found_B, wrong_B = parts_of_dates(each, ("?",), kind)
            np.testing.assert_array_equal(found_B, [expected, np.nan, expected])
            assert not wrong_B.any()


@pytest.mark.parametrize(
    "text",
    [
        *("2024-02-30", "2023-02-29 10:00", "2024-01-31 24:00", "2024-01-31 9:30", "2024-01-31 09:60"),
        *("31.01.2024", "yesterday", "2024-01-31 09:30 PM", "1706693400000", "nan", "1e12"),
    ],
)
def test_invalid_dates_are_reported(text: str) -> None:
    for kind in ("hour", "weekday"):
        found_B, wrong_B = parts_of_dates(pa.array(["2024-01-31", text]), ("",), kind)
        assert wrong_B.tolist() == [False, True]
        assert np.isnan(found_B).tolist() == [False, True]


def test_hour_and_weekday_of_parquet_types() -> None:
    moment = datetime(2024, 1, 31, 9, 30)
    berlin = moment.replace(tzinfo=UTC).astimezone(ZoneInfo("Europe/Berlin"))
    columns = [
        pa.array([moment, None], pa.timestamp("us")),
        pa.array([moment, None], pa.timestamp("s", "UTC")),
        pa.array([SECONDS, None], pa.int64()),
        pa.array([float(SECONDS), None], pa.float64()),
    ]
    for column in columns:
        found_B, wrong_B = parts_of_dates(column, (), "hour")
        np.testing.assert_array_equal(found_B, [9, np.nan])
        assert not wrong_B.any()
    for kind in (pa.date32(), pa.date64()):
        column = pa.array([date(2024, 1, 31), None], kind)
        np.testing.assert_array_equal(parts_of_dates(column, (), "weekday")[0], [2, np.nan])
        np.testing.assert_array_equal(parts_of_dates(column, (), "hour")[0], [0, np.nan])
    local = pa.array([berlin], pa.timestamp("s", "Europe/Berlin"))
    assert parts_of_dates(local, (), "hour")[0].tolist() == [berlin.hour] == [10]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "date32"])
def test_impossible_parquet_time_is_an_invalid_row(unit: str, tmp_path: Path) -> None:
    kind = pa.date32() if unit == "date32" else pa.timestamp(unit)
    far = {"s": 10**14, "ms": 2**62, "us": 2**62, "date32": 2**31 - 1}[unit]
    seen = pa.array([0, far, -far, None], pa.int32() if unit == "date32" else pa.int64()).cast(kind)
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
    of_text, wrong = seconds(text, ("", "?"))
    assert wrong.tolist() == [False, False, False, True, True, False, False]
    assert of_text[:3].tolist() == [1706659200, 1706693400.5, 1706693400]
    assert np.isnan(of_text[3:]).all()
    of_stamps, wrong = seconds(pa.array([np.datetime64("2024-01-31T09:30:00.5", "ms"), None]), ())
    assert (of_stamps[0], wrong.tolist()) == (1706693400.5, [False, False])
    (of_day,) = seconds(pa.array([date(2024, 1, 31)]), ())[0]
    assert of_day == 1706659200


def bounds_of(numbers: npt.ArrayLike, count: int, parts: int = 3) -> tuple[float, ...]:
    found = Quantiles()
    for part in np.array_split(np.asarray(numbers, np.float64), parts):
        found.add(part)
    return found.bounds(count)


def test_distinct_numbers_fill_buckets_equally() -> None:
    numbers = np.random.default_rng(0).permutation(np.arange(1200.0))
    assert bounds_of(numbers, 4) == (300, 600, 900)
    sizes = np.bincount(bucket_of(numbers, bounds_of(numbers, 7)))
    assert sizes[0] == 0
    assert set(sizes[1:].tolist()) <= {171, 172}


def test_equal_numbers_make_fewer_buckets() -> None:
    assert bounds_of([0.0] * 90 + [1.0] * 5 + [7.0] * 5, 10) == (1.0,)
    assert bounds_of([3.0] * 10, 5) == ()
    assert bounds_of([], 5) == ()


def test_bucket_includes_its_lower_bound() -> None:
    numbers = np.array([-np.inf, 0.999, 1.0, 1.5, 2.0, 1e300, np.nan])
    assert bucket_of(numbers, (1.0, 2.0)).tolist() == [1, 1, 2, 2, 3, 3, 0]
    assert bucket_of(numbers, ()).tolist() == [1] * 6 + [0]
    assert bucket_of(numbers, ()).dtype == np.int32


@pytest.mark.parametrize("sort", [False, True])
def test_quantiles_of_many_numbers_keep_the_error_bound(monkeypatch: pytest.MonkeyPatch, sort: bool) -> None:
    monkeypatch.setattr(scaling, "MAX_KEPT", kept := 4096)
    numbers = np.random.default_rng(1).lognormal(size=200_000)
    if sort:  # the worst order: each block is beyond those before it
        numbers.sort()
    found = Quantiles()
    for part in np.array_split(numbers, 41):
        found.add(part)
    numbers.sort()
    ranks = np.searchsorted(numbers, found.bounds(20)) / len(numbers)
    allowed = len(numbers) / (4 * (kept / 2) ** 2) + 1 / kept
    # What one replacement moves up another mostly moves down: half a step to one side would come near it.
    assert np.abs(ranks - np.arange(1, 20) / 20).max() <= allowed / 4
    few = Quantiles()
    few.add(numbers[:kept])
    assert few.bounds(4) == tuple(numbers[[1024, 2048, 3072]])
