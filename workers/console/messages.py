"""Lines of text for the user, warnings about data, and logging. This module does not import torch.

All other modules print through this one or ``terminal``. Log records go to stderr, which is the log file of a
role under ``hybrid launch``. Printing raises no error if a pipe or a terminal is closed, or a disk is full:
the text is lost, and the command reports the loss once.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from hybrid.storage.file_formats import replace_non_finite

if TYPE_CHECKING:
    from hybrid.data.dataset.dataset_manifest import DatasetReport
    from hybrid.data.encode.feature_encoder import UnknownValues

# Control characters (C0 and C1), bidirectional marks, separators of lines and paragraphs, and surrogates,
# which stand for bytes of file names that are not UTF-8.
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGES = ("hybrid", "workers")
_MAX_COLUMNS = 20
_STDOUT, _STDERR = 1, 2


class Verbosity(IntEnum):
    """How much a command prints."""

    QUIET = 0  # results, warnings and errors
    NORMAL = 1
    VERBOSE = 2  # like NORMAL, and log records


_verbosity = Verbosity.NORMAL


def verbosity() -> Verbosity:
    return _verbosity


@contextmanager
def logging_to_stderr(level: Verbosity, *, is_role_log: bool = False) -> Iterator[None]:
    """Send log records to stderr while the block lasts, and set the verbosity of this process.

    Args:
        level: QUIET logs errors; NORMAL also warnings; VERBOSE also records of level INFO.
        is_role_log: whether stderr is a role's log file; it gets INFO at any level, and DEBUG at VERBOSE.
    """
    global _verbosity
    if is_role_log:
        threshold = logging.DEBUG if level is Verbosity.VERBOSE else logging.INFO
    else:
        threshold = (logging.ERROR, logging.WARNING, logging.INFO)[level]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    if not is_role_log:  # the terminal shows these lines itself
        handler.addFilter(lambda record: record.name != "workers.console.terminal")
    loggers = [logging.getLogger(name) for name in _PACKAGES]
    previous_verbosity, previous_levels = _verbosity, [logger.level for logger in loggers]
    _verbosity = level
    for logger in loggers:
        logger.setLevel(threshold)
        logger.addHandler(handler)
    try:
        yield
    finally:
        _verbosity = previous_verbosity
        for logger, previous_level in zip(loggers, previous_levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(previous_level)


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print a line, with control characters escaped."""
    print(visible(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def print_text(text: str) -> None:
    """Print lines without escaping their control characters; not for text from files."""
    print(text, end="", flush=True)


def json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(replace_non_finite(values), indent=2, allow_nan=False) + "\n"


def visible(text: str) -> str:
    """Return ``text`` on one line; control characters become escapes such as ``\\x1b``.

    Text from files (column names, values, paths) could otherwise move the cursor, change colors, or run from
    right to left.
    """
    return _INVISIBLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def data_notes(report: DatasetReport) -> Iterator[str]:
    """Yield lines for the user about skipped rows, missing labels and unknown values of a split."""
    skipped = report.bad_rows
    if skipped.total:
        counts = {reason.replace("_", " "): count for reason, count in skipped.counts.items() if count}
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        yield f"skipped {skipped.total:,} invalid row(s): {reasons}"
        for example in skipped.examples:
            yield f"  {example}"
    for label in report.labels:
        of_task = f" for task {label.name}" if len(report.labels) > 1 else ""
        if report.num_rows and not label.count:
            yield f"none of {report.num_rows:,} evaluated rows has a label{of_task}: there are no metrics"
        if label.constant is not None and label.kind == "binary":
            rows = f"all {label.count:,} evaluated rows have label {label.constant:g}{of_task}"
            yield f"{rows}: AUC is undefined for them"
    for column in report.unknown:
        if column.several:
            found = f"{column.several:,} row(s) have several values in column {column.name}"
            rule = f"set columns.{column.name}.multi_hot_separator, or max_ids (Parquet)"
            yield f"warning: {found}, but no training row has; they count as unknown; {rule}"
    excessive = sorted((u for u in report.unknown if u.is_excessive), key=lambda u: -u.fraction)
    if excessive:
        columns = ", ".join(
            f"{u.fraction:.0%} of {u.name} ({u.expected:.0%} expected)" for u in excessive[:_MAX_COLUMNS]
        )
        more = f" and {len(excessive) - _MAX_COLUMNS} more columns" if len(excessive) > _MAX_COLUMNS else ""
        yield (
            f"warning: the model does not know many of the values: {columns}{more}; check that they are "
            "written as in the training files (expected is the fraction of training rows whose value no "
            "other training row has)"
        )


def unknown_fractions(unknown: Sequence[UnknownValues]) -> str:
    """Return the fractions of unknown values by column as text, largest first; "none" if all are known."""
    columns = sorted((u for u in unknown if u.count), key=lambda u: -u.fraction)
    shown = [f"{u.name} {u.fraction:.2%}" for u in columns[:_MAX_COLUMNS]]
    if len(columns) > _MAX_COLUMNS:
        rest = columns[_MAX_COLUMNS:]
        shown.append(f"and {len(rest)} more columns, at most {rest[0].fraction:.2%}")
    return ", ".join(shown) or "none"


class _TolerantFile(io.FileIO):
    """A file whose write errors are reported instead of raised."""

    def __init__(self, descriptor: int, report: Callable[[int, OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._report = report

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._report(self.fileno(), error)
            return memoryview(data).nbytes


@contextmanager
def tolerate_lost_output(
    command: str,
    *,
    run_continues: bool,
    names: tuple[str, str] = ("stdout", "stderr"),
    report_to: int = _STDERR,
) -> Iterator[set[str]]:
    """Keep this process running in the block if stdout or stderr cannot be written.

    If stdin, stdout or stderr is closed, a null device that refuses writes takes its descriptor, so that no
    other file gets it. Yields a set, to which the name of each lost stream is added.

    Args:
        command: name of the command, for messages.
        run_continues: whether the command does more than print. If not, a closed pipe is not reported.
        names: what messages call stdout and stderr.
        report_to: descriptor to which messages are written.
    """
    lost: set[str] = set()

    def report_once(descriptor: int, error: OSError) -> None:
        name = names[descriptor - _STDOUT]
        if name in lost:
            return
        lost.add(name)
        # If a reader closes the pipe of a command that only prints, nothing is wrong.
        should_report = run_continues or not isinstance(error, BrokenPipeError)
        if report_to != descriptor and should_report:
            effect = "output is lost, the run continues" if run_continues else "output is lost"
            with suppress(OSError):
                os.write(report_to, f"{command}: {name}: {error.strerror}; {effect}\n".encode())

    for descriptor in range(_STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY)  # gets the lowest free number
            os.set_inheritable(opened, True)
    before = sys.stdout, sys.stderr
    # Tests replace the streams.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _wrap(sys.stdout, _TolerantFile(_STDOUT, report_once))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _wrap(sys.stderr, _TolerantFile(_STDERR, report_once))
    try:
        yield lost
    finally:
        for file, previous in zip((sys.stdout, sys.stderr), before, strict=True):
            if file is not previous:
                file.flush()
        sys.stdout, sys.stderr = before


def _wrap(previous: Any, file: io.FileIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=getattr(previous, "encoding", "utf-8"),
        errors=getattr(previous, "errors", "backslashreplace"),
        line_buffering=getattr(previous, "line_buffering", False) or file.fileno() == _STDERR,
    )
