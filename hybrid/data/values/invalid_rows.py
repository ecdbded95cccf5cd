"""Reports of invalid rows, and an error if their fraction is larger than ``data.max_invalid_fraction``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import NamedTuple, Self

import pyarrow as pa

from hybrid.errors import DataError
from hybrid.storage.remote_path import StoragePath

MAX_EXAMPLES = 10
MAX_SHOWN = 60  # characters
MAX_LEADING_INVALID = 10_000  # invalid rows of a file before its first valid row


class Reason(StrEnum):
    """The reason why a row is invalid, such as ``unknown_label``."""

    advice: str  # the last words of an error message: what the user can do

    def __new__(cls, key: str, advice: str = "") -> Self:
        reason = str.__new__(cls, key)
        reason._value_ = key
        reason.advice = advice
        return reason

    COLUMNS = "wrong_column_count", "check data.columns and data.delimiter"
    LABEL = "unknown_label", "set data.positive_labels and data.negative_labels"
    NUMBER = "not_a_number", "check data.dense and data.missing"
    TEXT = "broken_text", "the file must be UTF-8 text with every quote closed on its line"
    INEXACT = "inexact_id", "write ids as integers or as text"
    LONG = "too_long_value", "check data.sparse, data.delimiter and data.multi_hot_separator"
    TARGET = "unusable_label", "check label and type of the section [tasks.NAME]"
    WEIGHT = "unusable_weight", "check data.weight"
    GROUP = "no_group", "check data.group and data.missing"
    DATE = "not_a_date", "check columns.NAME.kind (hour, weekday) and data.missing"
    ID_WEIGHT = "wrong_weight", "check the separators of the columns whose kind is weighted"
    MANY = "too_many_ids", "set max_ids higher, or too_many_ids of the column"
    SPLIT = "no_split_value", "check data.split and data.validation"
    TIME = "no_event_time", "check time in data.stream, and data.missing"


class InvalidRow(NamedTuple):
    """The lines and the content of an invalid row, and why it is invalid."""

    line: int  # the first line of the row, 1-based
    reason: Reason
    found: str  # a description of the invalid content, such as ``price is 'x', expected a finite number``
    last: int = 0  # the last line of a row of several lines, else 0

    def after(self, lines: int) -> InvalidRow:
        """Return a copy whose line numbers are larger by ``lines``."""
        return self._replace(line=self.line + lines, last=self.last + lines if self.last else 0)

    @property
    def text(self) -> str:
        """The description ``found``. For a row of several lines, the number of the last line is added."""
        return f"{self.found}, to line {self.last}" if self.last else self.found


def format_value(value: object) -> str:
    """Return a value for a message: on one line, cut to ``MAX_SHOWN`` characters."""
    text = str(value).strip()
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}... ({len(text):,} characters)"


def format_cell(column: pa.Array, i: int) -> str:
    """Return the value in row ``i`` of a column for a message."""
    try:
        return format_value(column[i].as_py())
    except (OverflowError, ValueError):  # a time that Python cannot represent
        return format_value(column.slice(i, 1).cast(pa.string())[0])


@dataclass(frozen=True)
class InvalidRowReport:
    """The number of invalid rows by reason, and descriptions of the first 10 invalid rows."""

    counts: dict[str, int]  # by Reason
    examples: tuple[str, ...]  # ``FILE:LINE: what is wrong``, at most 10

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @classmethod
    def merge(cls, reports: Sequence[Self]) -> Self:
        """Return the sums of the counts, without zeros, and the first 10 examples of all ``reports``."""
        counts = sum((Counter(each.counts) for each in reports), Counter[str]())
        examples = (example for each in reports for example in each.examples)
        return cls(dict(counts), tuple(islice(examples, MAX_EXAMPLES)))


class InvalidRowLog:
    """Collects the invalid rows of one pass over files, or of a stream.

    Args:
        max_fraction: the largest allowed fraction of invalid rows. ``finish`` checks the fraction. If
            ``max_fraction`` is 0, ``add`` already raises DataError at the first invalid row.
    """

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._counts: Counter[Reason] = Counter()
        self._examples: list[str] = []
        self._valid = 0
        self._path: StoragePath | None = None  # the current file
        self._leading: list[InvalidRow] = []  # the invalid rows of this file, while it has no valid row
        self._file_has_valid = False

    def add(self, path: StoragePath, num_valid: int, invalid: Sequence[InvalidRow]) -> None:
        """Record the number of valid rows and the invalid rows of the next block, from the file ``path``.

        Raises:
            DataError: a row is invalid and ``max_fraction`` is 0; all rows of the previous file are invalid;
                or the file has at least 10,000 rows so far, and all of them are invalid.
        """
        if path != self._path:
            self.check_file()
            self._path, self._file_has_valid = path, False
        self._valid += num_valid
        self._file_has_valid |= num_valid > 0
        rows = sorted(invalid)
        for row in rows:
            example = f"{path}:{row.line}: {row.text}"
            if not self._max_fraction:
                rule = f"{row.reason.advice}, or skip such rows with data.max_invalid_fraction = 0.1"
                raise DataError(f"{example}; {rule}")
            if len(self._examples) < MAX_EXAMPLES:
                self._examples.append(example)
            self._counts[row.reason] += 1
        self._leading = [] if self._file_has_valid else [*self._leading, *rows]
        if len(self._leading) >= MAX_LEADING_INVALID:
            self.check_file()

    def check_file(self) -> None:
        """Raise DataError if all recorded rows of the file of the last block are invalid."""
        rows = self._leading
        if not rows:
            return
        reason, count = Counter(row.reason for row in rows).most_common(1)[0]
        first = next(row for row in rows if row.reason == reason)
        found = f"no valid row among the first {len(rows)}, {count} like line {first.line}: {first.text}"
        raise DataError(f"{self._path}: {found}; {reason.advice}")

    def finish(self) -> InvalidRowReport:
        """Return the report. Raise DataError if too many rows, or all rows of the last file, are invalid."""
        self.check_file()
        invalid = self._counts.total()
        total = self._valid + invalid
        if invalid > self._max_fraction * total:
            rule = f"more than data.max_invalid_fraction = {self._max_fraction}"
            raise DataError(f"{invalid} of {total} rows are invalid, {rule}; the first: {self._examples[0]}")
        return self.report()

    def report(self) -> InvalidRowReport:
        """Return the report of the rows so far, without a check."""
        counts = {str(reason): self._counts[reason] for reason in Reason}
        return InvalidRowReport(counts, tuple(self._examples))
