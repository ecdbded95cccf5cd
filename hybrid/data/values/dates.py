"""Dates and times as seconds since 1970, and their hours and weekdays.

======================================= =========================================================
given                                   meaning
======================================= =========================================================
``2024-01-31``                          midnight
``2024-01-31 09:30``, with a ``T``,     that time, whatever zone (``Z``, ``+02:00``) follows
seconds, or a fraction of these too
numbers                                 seconds since 1970, UTC
dates and timestamps of Parquet         of a timestamp with a zone, the time in that zone
======================================= =========================================================

Hours and weekdays are those of the written time zone; none is converted.
"""

from contextlib import suppress
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.data.values.column_values import decoded, is_text, numbers

# The first number of each bucket but the lowest.
BOUNDS = {"hour": tuple(map(float, range(1, 24))), "weekday": tuple(map(float, range(1, 7)))}
EXPECTED = "a date such as 2024-01-31 09:30:00, or seconds since 1970"
_TIME = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([ T]([01][0-9]|2[0-3])(:[0-5][0-9]){1,2}([.][0-9]+)?(Z|[+-][0-9]{2}:?[0-9]{2})?)?$"
)
_ZONE = r"(Z|[+-][0-9]{2}:?[0-9]{2})$"
_MAX_SECONDS = 253_402_300_800  # the year 10000; larger numbers count something else, such as milliseconds
_DAY = 86_400
_UNITS = {"date32[day]": _DAY, "date64[ms]": 1e-3, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}  # seconds
_FIRST_DAY = date(1970, 1, 1).toordinal()  # a Thursday

Numbers = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def parts_of_dates(column: pa.Array, missing: tuple[str, ...], kind: str) -> tuple[Numbers, Mask]:
    """Return the hour (0-23) or weekday (Monday is 0) of each row, NaN if missing; and which are invalid."""
    seconds_B, wrong_B = seconds(column, missing)
    wrong_B |= np.abs(seconds_B) >= _MAX_SECONDS
    seconds_B[wrong_B] = np.nan
    return (seconds_B % _DAY // 3600 if kind == "hour" else (seconds_B // _DAY + 3) % 7), wrong_B


def seconds(column: pa.Array, missing: tuple[str, ...]) -> tuple[Numbers, Mask]:
    """Return the seconds since 1970 of each row, NaN if missing; and which are neither times nor numbers."""
    column = decoded(column)
    if pa.types.is_temporal(column.type):
        numbers_B = column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64()).to_numpy(
            zero_copy_only=False
        )
        unit = _UNITS.get(str(getattr(column.type, "unit", column.type)), 1)
        with np.errstate(invalid="ignore"):
            wrong_B = np.abs(numbers_B.astype(np.float64)) * unit >= _MAX_SECONDS
        if wrong_B.any():
            column = pc.if_else(pa.array(wrong_B), None, column)
        if getattr(column.type, "tz", None):
            column = pc.local_timestamp(column)
        microseconds = (
            column.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).cast(pa.float64(), safe=False)
        )
        return microseconds.to_numpy(zero_copy_only=False) / 1e6, wrong_B
    if not is_text(column):
        return numbers(column, missing)
    texts = pc.utf8_trim_whitespace(column)
    is_time_B = np.asarray(pc.fill_null(pc.match_substring_regex(texts, _TIME), False))
    times = pa.array(is_time_B)
    seconds_B, wrong_B = numbers(pc.if_else(times, None, texts), missing)
    dated = texts.filter(times)
    days = pc.utf8_slice_codeunits(dated, 0, 10).dictionary_encode()
    day_D = np.full(len(days.dictionary), np.nan)
    for i, text in enumerate(days.dictionary.to_pylist()):
        with suppress(ValueError):  # such as the 30th of February
            day_D[i] = date.fromisoformat(text).toordinal() - _FIRST_DAY
    past_minute = pc.replace_substring_regex(pc.utf8_slice_codeunits(dated, 16), _ZONE, "")
    parts = (
        (3600, pc.utf8_slice_codeunits(dated, 11, 13)),
        (60, pc.utf8_slice_codeunits(dated, 14, 16)),
        (1, pc.utf8_slice_codeunits(past_minute, 1)),
    )
    of_times: Numbers = day_D[np.asarray(days.indices)] * _DAY
    for unit, digits in parts:
        numbers_B = pc.if_else(pc.equal(digits, ""), "0", digits).cast(pa.float64())
        of_times = of_times + unit * numbers_B.to_numpy(zero_copy_only=False)
    seconds_B[is_time_B] = of_times
    return seconds_B, wrong_B | (is_time_B & np.isnan(seconds_B))
