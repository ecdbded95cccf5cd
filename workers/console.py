"""Output of every command: lines of text, log records, and the view of a run. Does not import torch.

Log records go to stderr, which is the log file of a role under ``hybrid launch``. Printing raises no error if
a pipe or a terminal is closed, or a disk is full: the text is lost, and the command reports the loss once.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybrid.config.task_sections import metric_title
from hybrid.storage.file_formats import replace_non_finite

if TYPE_CHECKING:
    from hybrid.data.dataset.dataset_manifest import DatasetReport
    from hybrid.data.encode.feature_encoder import UnknownValues
    from hybrid.metrics import Metrics

# Control characters (C0 and C1), bidirectional marks, separators of lines and paragraphs, and surrogates,
# which stand for bytes of file names that are not UTF-8.
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGES = ("hybrid", "workers")
_MAX_COLUMNS = 20
_STDOUT, _STDERR = 1, 2
# Colors that are readable on black and on white.
_DONE_STYLE, _COMMAND_STYLE = "color(29)", "color(31)"
_LABEL_WIDTH = 20
_LOG = logging.getLogger(__name__)


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
        is_role_log: whether stderr is a role's log file. Then INFO is logged at any level, DEBUG at VERBOSE.
    """
    global _verbosity
    if is_role_log:
        threshold = logging.DEBUG if level is Verbosity.VERBOSE else logging.INFO
    else:
        threshold = (logging.ERROR, logging.WARNING, logging.INFO)[level]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    if not is_role_log:  # the terminal shows these lines itself
        handler.addFilter(lambda record: record.name != __name__)
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
    """Print text as it is. For text from files, which may have control characters, use :func:`print_line`."""
    print(text, end="", flush=True)


def json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(replace_non_finite(values), indent=2, allow_nan=False) + "\n"


def visible(text: str) -> str:
    """Return ``text`` on one line; control characters become escapes such as ``\\x1b``.

    Text from files, such as column names, could otherwise move the cursor, change colors, or run backwards.
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

    A closed stdin, stdout or stderr is replaced by the null device, so that no file which is opened later
    gets the descriptor. Yields a set, to which the name of a stream is added when its output is lost.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """The numbers that a run shows and logs, at least every ``train.log_every_steps`` steps."""

    # step, epoch: counted from 1.
    step: int
    total_steps: int  # 0 if unknown
    epoch: int
    epochs: int
    # loss, score: over the samples since the last log step; NaN if unknown.
    loss: float
    score_name: str  # the metric in ``score``
    score: float
    samples_per_second: float  # over all trainers, since the last log step
    seconds_left: float  # until the last step; NaN if unknown, unused if ``total_steps`` is 0
    # Time since the last log step by phase (``hybrid.primitives.step_timings.PHASES``).
    phase_seconds: Mapping[str, float]
    numbers: Mapping[str, float] = field(default_factory=dict)  # further numbers for the log
    unit: str = ""  # the unit of a stream that is read

    @property
    def phase_fractions(self) -> dict[str, float]:
        """Fraction of the step time by phase; the fractions add up to 1 unless no time was spent."""
        total = sum(self.phase_seconds.values()) or 1.0
        return {phase: seconds / total for phase, seconds in self.phase_seconds.items()}


def _numbers(progress: TrainingProgress) -> list[tuple[str, str]]:
    return [
        ("loss", format_number(progress.loss)),
        (metric_title(progress.score_name), format_number(progress.score)),
        ("samples/s", f"{progress.samples_per_second:,.0f}"),
        *([("left", _clock(progress.seconds_left))] if progress.total_steps else []),
    ]


def _position(progress: TrainingProgress, form: str = "") -> tuple[str, str]:
    of_total = f"/{progress.total_steps:{form}}" if progress.total_steps else ""
    epoch = f"epoch {progress.epoch}/{progress.epochs}"
    return f"step {progress.step:{form}}{of_total}", visible(progress.unit) or epoch


def _phases(progress: TrainingProgress) -> list[tuple[str, str]]:
    return [(phase, f"{fraction:.0%}") for phase, fraction in progress.phase_fractions.items()]


def _live_lines(progress: TrainingProgress) -> list[RenderableType]:
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    step, epoch = _position(progress, ",")
    full = ProgressBar(
        progress.total_steps or None,
        progress.step,
        style=f"dim {_DONE_STYLE}",
        complete_style=_DONE_STYLE,
        finished_style=_DONE_STYLE,
    )
    bar.add_row(epoch, full if progress.total_steps else "", step)
    lines: list[RenderableType] = [bar]
    for pairs in (_numbers(progress), _phases(progress)):
        texts = [Text(f"{label} ", style="dim").append(value, style="not dim bold") for label, value in pairs]
        lines.append(Columns(texts, padding=(0, 3)))
    return lines


def format_number(value: float) -> str:
    """Return a number as text with four decimals; "unknown" for NaN."""
    return "unknown" if math.isnan(value) else f"{value:.4f}"


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class TerminalView:
    """The output of a run during a ``with`` block. A quiet command prints only warnings and results.

    A terminal shows a live region: lines that are redrawn. If ``console`` (default: stdout) is no terminal,
    or the command is verbose (log records would break the region), plain lines are printed instead.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._is_quiet = verbosity() is Verbosity.QUIET
        has_region = self._console.is_terminal and not self._console.is_dumb_terminal
        is_live = has_region and verbosity() is Verbosity.NORMAL
        # Only calls refresh the region, so that no thread draws.
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if is_live else None
        self._progress: TrainingProgress | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the live region, so that other code can print."""
        if self._live is not None:
            self._live.stop()

    def status(self, text: str) -> None:
        """Show what the run does between steps, such as saving a checkpoint, unless the command is quiet."""
        _LOG.info("%s", visible(text))
        if self._live is not None:
            self._draw(Text(visible(text), style="dim"))
        else:
            self._print(Text(visible(text)))

    def progress(self, progress: TrainingProgress) -> None:
        """Show progress in the live region. Without a region, print a line unless the command is quiet."""
        self._progress = progress
        if self._live is not None:
            self._draw()
        else:
            pairs = [*_numbers(progress), *_phases(progress)]
            head = _position(progress)
            self._print(Text("  ".join([*head, *(f"{label} {value}" for label, value in pairs)])))

    def note(self, text: str) -> None:
        """Print a line that is not overwritten, unless the command is quiet."""
        _LOG.info("%s", visible(text))
        self._print(Text(visible(text)))

    def warn(self, text: str) -> None:
        """Print a line that is not overwritten, even if the command is quiet."""
        _LOG.warning("%s", visible(text))
        self._print(Text(visible(text)), if_quiet=True)

    def evaluation(self, split: str, step: int, metrics: Metrics) -> None:
        """Print the metrics of a split, or of a stream unit, after ``step``, unless the command is quiet."""
        numbers = "  ".join(f"{metric_title(name)} {format_number(value)}" for name, value in metrics.items())
        _LOG.info("%s at step %d: %s", split, step, numbers)
        line = Text(f"{split} at step {step:,}", style="bold")
        self._print(line.append(f"  {numbers}", style="not bold"))

    def show(self, *results: RenderableType) -> None:
        """Print results and remove the live region."""
        self.close()
        for result in results:
            self._console.print(result, soft_wrap=True, highlight=False)

    def summary(self, results: Mapping[str, str], commands: Mapping[str, str]) -> None:
        """Print the results of a run and the user's next commands, by label; remove the live region."""
        self.close()
        self._console.print()
        width = max(_LABEL_WIDTH, 1 + max(map(len, results)))
        for label, value in {**results, **commands}.items():
            style = _COMMAND_STYLE if label in commands else ""
            if label.startswith(("test ", "validation ", "best ")) and "checkpoint" not in label:
                style = f"bold {_DONE_STYLE}"
            line = Text(f"{label:<{width}}", style="dim").append(visible(value), style=f"not dim {style}")
            # Soft wrap leaves line breaks to the terminal, so a copied command is complete.
            self._console.print(line, soft_wrap=True)

    def _print(self, line: Text, *, if_quiet: bool = False) -> None:
        if if_quiet or not self._is_quiet:
            self._console.print(line, soft_wrap=not self._console.is_terminal)

    def _draw(self, *below: RenderableType) -> None:
        assert self._live is not None
        above = [] if self._progress is None else _live_lines(self._progress)
        self._live.update(Group(*above, *below), refresh=True)


@contextmanager
def transient_status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a status during the block; it has no effect if stderr is no terminal."""
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    if not console.is_terminal:
        yield lambda text: None
        return
    with TerminalView(console) as view:
        yield view.status
