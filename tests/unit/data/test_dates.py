"""Hours and weekdays of every form of a date."""

from datetime import UTC, date, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import read

from hybrid.config import ColumnSection, DataSection
from hybrid.data.values.dates import parts_of_dates, seconds

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
def test_texts(text: str, hour: int, weekday: int) -> None:
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
def test_what_is_no_date(text: str) -> None:
    for kind in ("hour", "weekday"):
        found_B, wrong_B = parts_of_dates(pa.array(["2024-01-31", text]), ("",), kind)
        assert wrong_B.tolist() == [False, True]
        assert np.isnan(found_B).tolist() == [False, True]


def test_types_of_parquet() -> None:
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
def test_an_impossible_time_of_parquet_is_an_invalid_row(unit: str, tmp_path: Path) -> None:
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


def test_seconds_of_text_numbers_and_parquet_are_the_same() -> None:
    text = pa.array(["2024-01-31", " 2024-01-31T09:30:00.5Z", "1706693400", "soon", "2024-13-01", None, "?"])
    of_text, wrong = seconds(text, ("", "?"))
    assert wrong.tolist() == [False, False, False, True, True, False, False]
    assert of_text[:3].tolist() == [1706659200, 1706693400.5, 1706693400]
    assert np.isnan(of_text[3:]).all()
    of_stamps, wrong = seconds(pa.array([np.datetime64("2024-01-31T09:30:00.5", "ms"), None]), ())
    assert (of_stamps[0], wrong.tolist()) == (1706693400.5, [False, False])
    (of_day,) = seconds(pa.array([date(2024, 1, 31)]), ())[0]
    assert of_day == 1706659200
