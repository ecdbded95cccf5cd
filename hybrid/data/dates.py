"""Hours and weekdays of dates, as these are written: no time zone is turned into another.

======================================= =========================================================
given                                   meaning
======================================= =========================================================
``2024-01-31``                          midnight
``2024-01-31 09:30``, with a ``T``,     that time, whatever zone (``Z``, ``+02:00``) follows
seconds, or a fraction of these too
numbers                                 seconds since 1970, UTC
dates and timestamps of Parquet         of a timestamp with a zone, the time in that zone
======================================= =========================================================
"""

from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.data.columns import decoded, is_text, numbers

# The first number of each bucket but the lowest.
BOUNDS = {"hour": tuple(map(float, range(1, 24))), "weekday": tuple(map(float, range(1, 7)))}
EXPECTED = "a date such as 2024-01-31 09:30:00, or seconds since 1970"
_TIME = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([ T]([01][0-9]|2[0-3])(:[0-5][0-9]){1,2}([.][0-9]+)?(Z|[+-][0-9]{2}:?[0-9]{2})?)?$"
)
_MAX_SECONDS = 1e11  # the year 5138; what is more counts something else, such as milliseconds
_DAY = 86_400

Numbers = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def parts_of_dates(column: Any, missing: tuple[str, ...], kind: str) -> tuple[Numbers, Mask]:
    """The hour (0 to 23) or weekday (0 is Monday) of each row, NaN where missing; and which are no dates."""
    column = decoded(column)
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    if pa.types.is_timestamp(column.type):
        found = (pc.hour if kind == "hour" else pc.day_of_week)(column).cast(pa.float64())
        return found.to_numpy(zero_copy_only=False).copy(), np.zeros(len(column), np.bool_)
    if not is_text(column):
        return _of_seconds(column, missing, kind)
    texts = pc.utf8_trim_whitespace(column)
    is_time_B = np.asarray(pc.fill_null(pc.match_substring_regex(texts, _TIME), False))
    times = pa.array(is_time_B)
    numbers_B, wrong_B = _of_seconds(pc.if_else(times, None, texts), missing, kind)
    numbers_B[is_time_B], wrong_B[is_time_B] = _of_times(texts.filter(times), kind)
    return numbers_B, wrong_B


def _of_seconds(column: Any, missing: tuple[str, ...], kind: str) -> tuple[Numbers, Mask]:
    seconds_B, wrong_B = numbers(column, missing)
    wrong_B |= np.abs(seconds_B) >= _MAX_SECONDS
    seconds_B[wrong_B] = np.nan
    hour_B, weekday_B = seconds_B % _DAY // 3600, (seconds_B // _DAY + 3) % 7  # 1970 began on a Thursday
    return (hour_B if kind == "hour" else weekday_B), wrong_B


def _of_times(texts: Any, kind: str) -> tuple[Numbers, Mask]:
    """The same of texts that look like dates, none of which is null."""
    days = pc.utf8_slice_codeunits(texts, 0, 10).dictionary_encode()
    weekday_D = np.array([_weekday(day) for day in days.dictionary.to_pylist()], np.float64)
    weekday_B = weekday_D[np.asarray(days.indices)]
    wrong_B = np.isnan(weekday_B)
    if kind == "weekday":
        return weekday_B, wrong_B
    hours = pc.utf8_slice_codeunits(texts, 11, 13)
    hours = pc.if_else(pc.equal(hours, ""), "0", hours).cast(pa.float64())
    return np.where(wrong_B, np.nan, hours.to_numpy(zero_copy_only=False)), wrong_B


def _weekday(day: str) -> float:
    try:
        return float(date.fromisoformat(day).weekday())
    except ValueError:  # such as the 30th of February
        return float("nan")
