"""Columns of any type as labels, numbers, times and categorical values.

Columns of text files hold strings. Columns of Parquet files may also hold integers, floats, booleans,
dictionaries and lists. Null is a missing value, and so is NaN in a column of floats.

Times are seconds since 1970:

======================================= =========================================================
given                                   meaning
======================================= =========================================================
``2024-01-31``                          midnight
``2024-01-31 09:30``, also with a       that time; a zone after it (``Z``, ``+02``, ``+02:00``, `` UTC``,
``T``, seconds, or a fraction           `` Europe/Berlin``) is ignored
numbers                                 seconds since 1970, UTC
dates and timestamps of Parquet         that time; for a timestamp with a zone, the local time of the zone
======================================= =========================================================

So hours and weekdays are those of the zone in the file, not of UTC. The resolution is a microsecond.
"""

import re
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybrid.data.values.canonical import canonical_text, canonicalize, trim_blanks
from hybrid.primitives.key_hashes import next_random

Numbers: TypeAlias = npt.NDArray[np.float64]
T = TypeVar("T", bound=np.generic)
Mask: TypeAlias = npt.NDArray[np.bool_]

MAX_NUMBER = float(np.finfo(np.float32).max)
MAX_VALUE_BYTES = 4096  # of a categorical value, since vocabularies hold values in memory
# The lower bounds of all buckets except the lowest.
DATE_BOUNDS = {"hour": tuple(map(float, range(1, 24))), "weekday": tuple(map(float, range(1, 7)))}
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_ZONE = r"( ?(Z|[+-][0-9]{2}(:?[0-9]{2})?)| UTC| GMT| [A-Z][A-Za-z]+(/[A-Za-z0-9_+-]+)+)"
_TIME = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"
    rf"([ T]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]+)?)?{_ZONE}?)?$"
)
_LIST = r"^[\[({][^\[\](){}]*[\])}]$"
# Year, month, day, and perhaps hour and minute. Such a number could also mean seconds.
_MONTH_DAY, _HOUR = "(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])", "([01][0-9]|2[0-3])"
_DIGITS = f"^((19[7-9]|20[0-9])[0-9]{_MONTH_DAY}({_HOUR}([0-5][0-9])?)?|[0-9]{{2}}{_MONTH_DAY}{_HOUR}?)$"
MAX_SECONDS = 253_402_300_800  # the year 10000; larger numbers have another unit, such as milliseconds
_DAY = 86_400
_LOCAL_TIME = r"^(?P<time>.{10}(?:[ T][0-9:]{5,8}(?:[.][0-9]{1,6})?)?)"  # a time without its zone


class Values(NamedTuple):
    """The canonical texts of a categorical column of B rows, and masks of its invalid rows."""

    coded: pa.Array  # a dictionary array of strings, null if missing; or lists of strings without nulls
    inexact_B: Mask  # whether a value of the row is inexact (see hybrid.data.values.canonical)
    too_long_B: Mask  # whether a value of the row has more than ``MAX_VALUE_BYTES``


def is_list(column: pa.Array) -> bool:
    kind = column.type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def convert_maps(column: pa.Array) -> pa.Array:
    """Convert a column of maps to lists of (key, value) pairs. Return any other column unchanged."""
    if not pa.types.is_map(column.type):
        return column
    pairs = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
    return pa.ListArray.from_arrays(column.offsets, pairs)


def parse_values(column: pa.Array, missing: tuple[str, ...], separator: str = "") -> Values:
    """Convert the values of a categorical column to canonical texts (:mod:`hybrid.data.values.canonical`).

    Args:
        missing: texts that mean a missing value. A missing value becomes null, or is dropped from its list.
        separator: if not empty, each text of a column without lists is split into a list at the separators.
    """
    if separator and not is_list(column):
        column = split_texts(decode_texts(column).cast(pa.string()), separator)
    if is_list(column):
        return group_values(parse_flat_values(pc.list_flatten(column), missing), list_lengths(column))
    return parse_flat_values(column, missing)


def split_texts(texts: pa.Array, separator: str) -> pa.Array:
    """Split each text into a list of items at ``separator``. If ``separator`` is empty, a text is one item.

    Null is split like an empty text. If the separator is a comma or a blank, the brackets and quotes of a
    list as pandas or PostgreSQL writes it, such as ``['a', 'b']`` or ``{a,b}``, are removed.
    """
    texts = trim_blanks(pc.fill_null(texts, ""))
    if not separator:
        return pa.ListArray.from_arrays(pa.array(np.arange(len(texts) + 1), pa.int32()), texts)
    if separator.strip() in ("", ","):
        is_list_B = pc.match_substring_regex(texts, _LIST)
        if pc.any(is_list_B).as_py():
            inner = pc.utf8_slice_codeunits(texts, 1, -1)
            inner = pc.replace_substring_regex(inner, rf"(^|{re.escape(separator)})\s*['\"]", r"\1")
            inner = pc.replace_substring_regex(inner, rf"['\"]\s*($|:|{re.escape(separator)})", r"\1")
            texts = pc.if_else(is_list_B, inner, texts)
    return pc.split_pattern(texts, separator)


def list_lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the number of items of each list. Null has 0 items."""
    return np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)


def take_or_default(values_D: npt.NDArray[T], indices: pa.Array, if_null: float) -> npt.NDArray[T]:
    """Return the element of ``values_D`` for each index, or ``if_null`` if the index is null."""
    index: npt.NDArray[np.int64] = np.asarray(indices.fill_null(len(values_D)))
    return np.append(values_D, np.array(if_null, values_D.dtype))[index]


def group_items(items: pa.Array, kept_L: Mask, lengths_B: npt.NDArray[np.int64]) -> pa.ListArray:
    """Cut L items into B lists of ``lengths_B`` items, and drop the items where ``kept_L`` is false."""
    num_kept = np.concatenate([[0], np.cumsum(kept_L)])
    offsets = num_kept[np.concatenate([[0], np.cumsum(lengths_B)])]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items.filter(pa.array(kept_L)))


def find_rows(mask_L: Mask, lengths_B: npt.NDArray[np.int64]) -> Mask:
    """Return a mask of the rows with an item where ``mask_L`` is true.

    The L items are ordered by row. Row b has ``lengths_B[b]`` items.
    """
    rows_B = np.zeros(len(lengths_B), np.bool_)
    rows_B[np.repeat(np.arange(len(lengths_B)), lengths_B)[mask_L]] = True
    return rows_B


def group_values(items: Values, lengths_B: npt.NDArray[np.int64]) -> Values:
    """Cut values into B lists of ``lengths_B`` values, without nulls. Masks mark lists of invalid values."""
    lists = group_items(items.coded, np.asarray(items.coded.is_valid()), lengths_B)
    return Values(lists, find_rows(items.inexact_B, lengths_B), find_rows(items.too_long_B, lengths_B))


def truncate_lists(lists: pa.ListArray, limit: int, *, from_start: bool) -> pa.ListArray:
    """Keep the first ``limit`` items of each list, or the last ones if ``from_start`` is false."""
    lengths_B = np.diff(np.asarray(lists.offsets)).astype(np.int64)
    position_L = np.arange(lengths_B.sum()) - np.repeat(lengths_B.cumsum() - lengths_B, lengths_B)
    if not from_start:
        position_L = np.repeat(lengths_B, lengths_B) - 1 - position_L
    return group_items(lists.flatten(), position_L < limit, lengths_B)


def parse_flat_values(column: pa.Array, missing: tuple[str, ...]) -> Values:
    """Convert a column without lists as :func:`parse_values` does. Each distinct value is processed once."""
    indices, distinct = _distinct(column)
    texts, inexact_D = canonicalize(distinct)
    too_long_D = np.asarray(pc.fill_null(pc.greater(pc.binary_length(texts), MAX_VALUE_BYTES), False))
    absent_texts = pa.array([canonical_text(text)[0] for text in missing], pa.string())
    absent_D = np.asarray(pc.or_(texts.is_null(), pc.is_in(texts, value_set=absent_texts)))
    absent_B = take_or_default(absent_D, indices, True)
    inexact_B, too_long_B = (
        take_or_default(mask_D, indices, False) if mask_D.any() else np.zeros(len(indices), np.bool_)
        for mask_D in (inexact_D, too_long_D)
    )
    index_B = np.asarray(indices.fill_null(0))
    texts = texts.fill_null("") if texts.null_count else texts  # no dictionary has null
    coded = pa.DictionaryArray.from_arrays(pa.array(index_B, pa.int32(), mask=absent_B), texts)
    return Values(coded, inexact_B & ~absent_B, too_long_B & ~absent_B)


def parse_keys(integers: pa.Array, missing: tuple[str, ...]) -> pa.Array:
    """Return the key of each integer as :func:`compute_keys` does for its text, or null if it is missing."""
    texts = [canonical_text(text)[0] for text in missing]
    limits = np.iinfo(integers.type.to_pandas_dtype())
    numbers = [int(text) for text in texts if re.fullmatch(r"-?[0-9]{1,20}", text) and str(int(text)) == text]
    if absent := [number for number in numbers if limits.min <= number <= limits.max]:
        is_absent = pc.is_in(integers, value_set=pa.array(absent, integers.type))
        integers = pc.if_else(is_absent, None, integers)
    numbers_B = integers.fill_null(0).to_numpy(zero_copy_only=False).astype(np.uint64)
    return pa.array(next_random(numbers_B).view(np.int64), mask=np.asarray(integers.is_null()))


def parse_numbers(column: pa.Array, missing: tuple[str, ...]) -> tuple[Numbers, Mask]:
    """Return numbers, NaN if missing, and a mask of invalid values (no number, or too large for float32)."""
    column = decode_texts(column)
    has_text = is_text(column)
    if has_text:
        column = trim_blanks(column)
        column = pc.if_else(pc.is_in(column, value_set=pa.array(missing, pa.string())), None, column)
        given = np.asarray(column.is_valid())
        try:
            column = column.cast(pa.float64())
        except pa.ArrowInvalid:
            well_formed = pc.match_substring_regex(column, _NUMBER)
            column = pc.if_else(well_formed, column, None).cast(pa.float64())
    else:
        column = column.cast(pa.float64(), safe=False)
    numbers_B = np.array(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        not_numbers = np.abs(numbers_B) > MAX_NUMBER
    if has_text:  # malformed texts, and the text "nan"
        not_numbers |= given & np.isnan(numbers_B)
    # If -999 means missing, -999.0 does, too.
    absent = [float(text) for text in missing if re.match(_NUMBER, text)]
    if absent:
        numbers_B[np.isin(numbers_B, absent)] = np.nan
    return numbers_B, not_numbers


def parse_seconds(column: pa.Array, missing: tuple[str, ...]) -> tuple[Numbers, Mask]:
    """Return times in seconds since 1970, NaN if missing, and a mask of the invalid values.

    Numbers are valid, and times up to the year 9999 in the forms that the module describes.
    """
    column = decode_texts(column)
    if is_text(column):
        return _seconds_of_texts(pc.utf8_trim_whitespace(column), missing)
    if not pa.types.is_temporal(column.type):
        return parse_numbers(column, missing)
    whole_seconds = column.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
    wrong_B = np.abs(pc.fill_null(whole_seconds, 0).to_numpy()) >= MAX_SECONDS  # beyond the year 9999
    column = pc.if_else(pa.array(wrong_B), None, column)
    if getattr(column.type, "tz", None):
        column = pc.local_timestamp(column)
    return _to_seconds(column.cast(pa.timestamp("us"), safe=False)), wrong_B


def _seconds_of_texts(texts: pa.Array, missing: tuple[str, ...]) -> tuple[Numbers, Mask]:
    is_time_B = np.asarray(pc.fill_null(pc.match_substring_regex(texts, _TIME), False))
    seconds_B, wrong_B = parse_numbers(pc.if_else(pa.array(is_time_B), None, texts), missing)
    times = texts.filter(pa.array(is_time_B))
    dates = pc.utf8_slice_codeunits(times, 0, 10).dictionary_encode()
    days = _parse_dates(dates.dictionary, "%Y-%m-%d")
    is_day_D = pc.and_(days.is_valid(), pc.greater(dates.dictionary, "0001"))  # the first year is 1
    times = pc.if_else(is_day_D.take(dates.indices), times, None)
    local_times = pc.struct_field(pc.extract_regex(times, _LOCAL_TIME), [0])
    seconds_B[is_time_B] = _to_seconds(local_times.cast(pa.timestamp("us")))
    return seconds_B, wrong_B | (is_time_B & np.isnan(seconds_B))


def _parse_dates(texts: pa.Array, date_format: str) -> pa.Array:
    """Parse dates. A zone in the text is ignored. The result is null if the text is no date of the format."""
    # strptime takes the 30th of February for a day of March. The last day and the last zone in a text count.
    parse = partial(pc.strptime, unit="s", error_is_null=True)
    dates = parse(pc.binary_join_element_wise(texts, "+0000", " "), format=f"{date_format} %z")
    firsts = parse(pc.binary_join_element_wise(texts, "1 +0000", " "), format=f"{date_format} %d %z")
    return pc.if_else(pc.equal(pc.month(dates), pc.month(firsts)), dates, None)


def _to_seconds(times: pa.Array) -> Numbers:
    microseconds = times.cast(pa.int64()).cast(pa.float64(), safe=False)
    return np.asarray(microseconds.to_numpy(zero_copy_only=False) / 1e6)


def parse_date_parts(
    column: pa.Array, missing: tuple[str, ...], kind: str, date_format: str = ""
) -> tuple[Numbers, Mask]:
    """Return the hours (0-23) or weekdays (0 is Monday) of dates, and a mask of invalid values.

    ``kind`` is "hour" or "weekday". The result is NaN for missing and invalid values. ``date_format`` is a
    format of ``strptime`` for texts and numbers. If it is empty, values are parsed by :func:`parse_seconds`.
    """
    value_type = _decoded_type(column.type)
    if date_format and not (pa.types.is_date(value_type) or pa.types.is_timestamp(value_type)):
        indices, distinct = _distinct(column)
        coded = parse_flat_values(pa.DictionaryArray.from_arrays(indices, distinct), missing).coded
        # The text of the file may have a midnight or a T that its canonical text lacks, or be a float.
        texts_D = trim_blanks(distinct.cast(pa.string()))
        dates_D = pc.coalesce(_parse_dates(texts_D, date_format), _parse_dates(coded.dictionary, date_format))
        seconds_D = dates_D.cast(pa.int64()).cast(pa.float64()).to_numpy(zero_copy_only=False)
        seconds_B = take_or_default(seconds_D, coded.indices, np.nan)
        wrong_B = np.isnan(seconds_B) & np.asarray(coded.is_valid())
    else:
        seconds_B, wrong_B = parse_seconds(column, missing)
    wrong_B |= np.abs(seconds_B) >= MAX_SECONDS
    seconds_B[wrong_B] = np.nan
    return (seconds_B % _DAY // 3600 if kind == "hour" else (seconds_B // _DAY + 3) % 7), wrong_B


def find_digit_dates(column: pa.Array, missing: tuple[str, ...]) -> Mask:
    """Return a mask of the present values if all are dates in digits (20240131), else an all-false mask."""
    texts = pc.utf8_trim_whitespace(decode_texts(column).cast(pa.string()))
    is_missing_B = np.asarray(pc.is_in(texts, value_set=pa.array(missing, pa.string())))
    given_B = np.asarray(texts.is_valid()) & ~is_missing_B
    is_date_B = np.asarray(pc.fill_null(pc.match_substring_regex(texts, _DIGITS), False))
    return given_B if is_date_B[given_B].all() else np.zeros_like(given_B)


def parse_labels(
    column: pa.Array, positive: tuple[str, ...], negative: tuple[str, ...]
) -> tuple[npt.NDArray[np.uint8], Mask]:
    """Return labels (1 if positive, 0 if negative), and a mask of the labels that are neither, or missing."""
    indices, distinct = _distinct(column)
    known = pa.array([canonical_text(text)[0] for text in (*positive, *negative)], pa.string())
    position_D = np.asarray(pc.fill_null(pc.index_in(canonicalize(distinct)[0], value_set=known), -1))
    position_B = take_or_default(position_D, indices, -1)
    return (position_B < len(positive)).astype(np.uint8), position_B < 0


def _distinct(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return for each row the index of its value (null if missing), and the array of distinct values."""
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    if len(coded.dictionary) <= len(coded):
        return coded.indices, coded.dictionary
    used = coded.indices.dictionary_encode()  # the dictionary may have values that no row uses
    return used.indices, coded.dictionary.take(used.dictionary)


def is_text(column: pa.Array) -> bool:
    """Return whether a column is an array of strings. A dictionary array of strings is not."""
    return isinstance(column, pa.StringArray | pa.LargeStringArray)


def decode_texts(column: pa.Array) -> pa.Array:
    """Decode the dictionary of a column, if any. Convert bytes, string views and null arrays to strings."""
    column = decode_dictionary(column)
    others = pa.NullArray | pa.StringViewArray | pa.BinaryArray | pa.LargeBinaryArray
    return column.cast(pa.string()) if isinstance(column, others) else column


def decode_dictionary(column: pa.Array) -> pa.Array:
    """Decode the dictionary of a column, if any."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def decode_dictionaries(column: pa.Array) -> pa.Array:
    """Decode the dictionaries of a column and of its list items, so that all blocks have the same type."""
    column = decode_dictionary(column)
    if not is_list(column):
        return column
    items = column.type.value_type
    if pa.types.is_struct(items):  # an id and its weight
        items = pa.struct([(each.name, _decoded_type(each.type)) for each in items])
    return column.cast(pa.list_(_decoded_type(items)))


def _decoded_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
