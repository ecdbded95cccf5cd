"""Warnings about the rows of a data set: rejected rows, labels, and values unknown to the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.data.dataset.dataset_manifest import DatasetReport
    from hybrid.data.encode.unknown_values import UnknownValues
    from hybrid.data.values.invalid_rows import InvalidRowReport

_MAX_COLUMNS = 20


def data_notes(report: DatasetReport) -> Iterator[str]:
    """Yield what a user must know of a split before trusting a number about it."""
    yield from bad_row_lines(report.bad_rows)
    for label in report.labels:
        of_task = f" for task {label.name}" if len(report.labels) > 1 else ""
        if report.num_rows and not label.count:
            yield f"none of {report.num_rows:,} test rows has a label{of_task}: there are no metrics"
        if label.only is not None and label.kind == "binary":
            rows = f"all {label.count:,} test rows have label {label.only:g}{of_task}"
            yield f"{rows}: AUC is undefined for them"
    far = sorted((u for u in report.unknown if u.is_excessive), key=lambda u: -u.fraction)
    if far:
        columns = ", ".join(
            f"{u.fraction:.0%} of {u.name} ({u.expected:.0%} expected)" for u in far[:_MAX_COLUMNS]
        )
        more = f" and {len(far) - _MAX_COLUMNS} more columns" if len(far) > _MAX_COLUMNS else ""
        yield (
            "warning: many more values are unknown to the model than in rows like the training rows: "
            f"{columns}{more}; check that they are written as in the training files (expected is the "
            "fraction of training rows whose value no other training row has)"
        )


def bad_row_lines(report: InvalidRowReport) -> Iterator[str]:
    """Yield how many rows were skipped and why, then the first of them; nothing if all rows are valid."""
    if not report.total:
        return
    counts = {reason.replace("_", " "): count for reason, count in report.counts.items() if count}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
    yield f"skipped {report.total:,} invalid row(s): {reasons}"
    for example in report.examples:
        yield f"  {example}"


def unknown_fractions(unknown: Sequence[UnknownValues]) -> str:
    """Return the fraction of unknown values by column, the largest first; "none" if all are known."""
    columns = sorted((u for u in unknown if u.count), key=lambda u: -u.fraction)
    shown = [f"{u.name} {u.fraction:.2%}" for u in columns[:_MAX_COLUMNS]]
    if len(columns) > _MAX_COLUMNS:
        rest = columns[_MAX_COLUMNS:]
        shown.append(f"and {len(rest)} more columns, at most {rest[0].fraction:.2%}")
    return ", ".join(shown) or "none"
