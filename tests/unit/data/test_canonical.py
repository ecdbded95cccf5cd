"""One text for a categorical value, whatever format it comes from."""

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hybrid.data.values.canonical import canonical, canonical_text, trimmed
from hybrid.data.values.column_values import labels, numbers, values


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
def test_texts_that_mean_the_same(text: str, expected: str) -> None:
    assert canonical_text(text) == (expected, False)
    assert canonical(pa.array(["a", text, None]))[0].to_pylist() == [
        "a",
        expected,
        None,
    ]  # nothing else to see


@pytest.mark.parametrize("blank", [*" \t\n\v\f\r\x1c\x1f", "\x85", "\xa0", "\u3000"])
def test_blanks_around_a_text_are_none_of_it(blank: str) -> None:
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
def test_texts_that_may_mean_something_else(text: str) -> None:
    assert canonical_text(text) == (text, False)


@pytest.mark.parametrize("text", ["9007199254740992.0", "1e+16", "-1.2345678901234568e+18", "1.0E16"])
def test_floats_too_large_to_be_exact(text: str) -> None:
    assert canonical_text(text)[1]
    assert not canonical_text("9007199254740991.0")[1]
    assert canonical_text("9007199254740993") == ("9007199254740993", False)


NOON = datetime.datetime(2024, 1, 31, 12)


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
        (pa.array([datetime.date(2024, 1, 31)]), ["2024-01-31"]),
        (pa.array([datetime.datetime(2024, 1, 31), NOON]), ["2024-01-31", "2024-01-31 12:00:00"]),
        (pa.array([NOON], pa.timestamp("ns", "UTC")), ["2024-01-31 12:00:00Z"]),
        (pa.array([5.0, 6.0]).dictionary_encode(), ["5", "6"]),
        (pa.nulls(2), [None, None]),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_columns_of_every_type(column: Any, texts: list[str | None]) -> None:
    coded = values(column, ()).coded
    assert coded.to_pylist() == texts
    assert coded.type.value_type == pa.string()


def test_labels_and_missing_values_go_by_the_same_texts() -> None:
    found, unknown = labels(pa.array(["1.0", "True", "0", "no"]), ("1",), ("0.0",))
    assert found[:3].tolist() == [1, 1, 0]
    assert unknown.tolist() == [False, False, False, True]
    assert values(pa.array(["-1.0", "-1", "5"]), ("-1",)).coded.to_pylist() == [None, None, "5"]
    for column in (pa.array(["-999.0", "-999", "1"]), pa.array([-999.0, -999, 1]), pa.array([-999, -999, 1])):
        assert np.isnan(numbers(column, ("", "-999"))[0]).tolist() == [True, True, False]


def test_lists_are_folded_item_by_item() -> None:
    found = values(pa.array([[5.0, 2.0**53], None, [float("nan"), 7.5]]), ())
    assert found.coded.to_pylist() == [["5", str(2**53)], [], ["7.5"]]
    assert found.inexact_B.tolist() == [True, False, False]
