"""The view of a run: a live region on a terminal, plain lines in a pipe or file. Free of torch."""

from __future__ import annotations

import logging
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.config.task_sections import metric_title
from hybrid.storage.remote_path import StoragePath
from workers.console.data_notes import unknown_fractions
from workers.console.messages import Verbosity, verbosity, visible

if TYPE_CHECKING:
    from hybrid.checkpoint.checkpoint_manifest import Best
    from hybrid.data.encode.unknown_values import UnknownValues
    from hybrid.metrics import Metrics
    from hybrid.protocol.update_rules import Staleness

# Colors that are readable on black and on white.
DONE_STYLE = "color(29)"
COMMAND_STYLE = "color(31)"
_MIN_BAR_WIDTH = 8
_LABEL_WIDTH = 20
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """The state of a run at one log step.

    Attributes:
        step, total_steps, epoch, epochs: counted from 1.
        loss, score: over the samples since the last log step; NaN if unknown.
        score_name: the metric in ``score``.
        samples_per_second: over all trainers, since the last log step.
        seconds_left: until the last step; NaN if unknown.
        phase_seconds: time since the last log step by phase (``hybrid.primitives.step_timings.PHASES``).
        staleness: of the table updates since the last log step; None in modes without staleness.
    """

    step: int
    total_steps: int
    epoch: int
    epochs: int
    loss: float
    score_name: str
    score: float
    samples_per_second: float
    seconds_left: float
    phase_seconds: Mapping[str, float]
    staleness: Staleness | None = None

    @property
    def phase_shares(self) -> dict[str, float]:
        """Fraction of the step time by phase; the fractions add up to 1 unless no time was spent."""
        total = sum(self.phase_seconds.values()) or 1.0
        return {phase: seconds / total for phase, seconds in self.phase_seconds.items()}


def live_lines(progress: TrainingProgress, console: Console) -> list[RenderableType]:
    """Return the bar, the numbers and the time by phase; a narrow terminal takes more lines for each."""
    numbers = [
        ("loss", format_number(progress.loss)),
        (metric_title(progress.score_name), format_number(progress.score)),
        ("samples/s", f"{progress.samples_per_second:,.0f}"),
        ("left", _clock(progress.seconds_left)),
    ]
    if progress.staleness is not None:
        numbers.append(("staleness", _staleness_text(progress.staleness)))
    phases = [(phase, f"{fraction:.0%}") for phase, fraction in progress.phase_shares.items()]
    lines: list[RenderableType] = [*_bar(progress, console)]
    for pairs in (numbers, phases):
        parts = [Text(f"{label} ", style="dim").append(value, style="not dim bold") for label, value in pairs]
        lines += wrap_parts(parts, console.width, gap=3)
    return lines


def wrap_parts(parts: Sequence[Text], width: int, gap: int) -> list[Text]:
    """Return lines of ``width`` that hold the parts one after another, none of them cut."""
    lines = [parts[0].copy()]
    for part in parts[1:]:
        if len(lines[-1]) + gap + len(part) <= width:
            lines[-1].append(" " * gap).append_text(part)
        else:
            lines.append(part.copy())
    return lines


def _bar(progress: TrainingProgress, console: Console) -> list[RenderableType]:
    before = Text(f"epoch {progress.epoch}/{progress.epochs}")
    after = Text(f"step {progress.step:,}/{progress.total_steps:,}")
    width = console.width - len(before) - len(after) - 2
    if width < _MIN_BAR_WIDTH:
        return [*wrap_parts([before, after], console.width, gap=1)]
    bar = ProgressBar(
        progress.total_steps,
        progress.step,
        width=width,
        style=f"dim {DONE_STYLE}",
        complete_style=DONE_STYLE,
        finished_style=DONE_STYLE,
    )
    grid = Table.grid(padding=(0, 1))
    grid.add_row(before, bar, after)
    return [grid]


def plain_parts(progress: TrainingProgress) -> Iterator[str]:
    """Yield the parts of one line for output that is not a terminal."""
    yield f"step {progress.step}/{progress.total_steps}"
    yield f"epoch {progress.epoch}/{progress.epochs}"
    yield f"loss {format_number(progress.loss)}"
    yield f"{metric_title(progress.score_name)} {format_number(progress.score)}"
    yield f"{progress.samples_per_second:,.0f} samples/s"
    yield f"left {_clock(progress.seconds_left)}"
    if progress.staleness is not None:
        yield f"staleness {_staleness_text(progress.staleness)}"
    yield " ".join(f"{phase} {fraction:.0%}" for phase, fraction in progress.phase_shares.items())


def format_number(value: float) -> str:
    """Return a number with four decimals."""
    return "unknown" if math.isnan(value) else f"{value:.4f}"


def _staleness_text(staleness: Staleness) -> str:
    """Return the mean and maximum number of updates that rows were behind."""
    return f"{staleness.mean:.2f} (at most {staleness.largest})"


def _clock(seconds: float) -> str:
    """Return ``1:02:03``, or ``2:03`` for less than an hour."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """The recorded steps of a run.

    Attributes:
        folder: of trace and table.
        step_seconds: duration of a step.
        shares: fractions of the step time, of the spans that take most of it.
    """

    folder: Path
    step_seconds: float
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run.

    Attributes:
        metrics, step: on the test rows, after the last step; None if there are no test rows.
        score: the metric that comes first.
        best: the best evaluation whose model is kept; None if there is none.
        best_auc: AUC that no model can exceed, if the data have one.
        samples_per_second: over all trainers and the whole run.
        run_folder, curves: paths of the results.
        profile: of the recorded steps, if steps were recorded.
        resume, evaluate, predict: commands to continue with.
        unknown: values of the test rows that are unknown to the model, by column.
    """

    metrics: Metrics | None
    score: str = "auc"
    step: int
    best: Best | None
    best_auc: float | None
    samples_per_second: float
    run_folder: StoragePath
    curves: Path
    resume: str
    evaluate: str
    predict: str
    profile: ProfileSummary | None = None
    unknown: Sequence[UnknownValues] = ()


class TerminalView:
    """Shows a run while the ``with`` block lasts; a quiet command shows warnings and results only.

    A verbose command prints plain lines, since log records would break a live region.

    Args:
        console: by default stdout, with plain lines unless it is a terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._is_quiet = verbosity() is Verbosity.QUIET
        has_region = self._console.is_terminal and not self._console.is_dumb_terminal
        is_live = has_region and verbosity() is Verbosity.NORMAL
        # Refreshed by calls only, so that no thread draws.
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if is_live else None
        self._progress: TrainingProgress | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the live region and leave the terminal to others."""
        if self._live is not None:
            self._live.stop()

    def status(self, text: str) -> None:
        """Show what the run does between steps, such as saving a checkpoint."""
        _LOG.info("%s", visible(text))
        if self._live is not None:
            self._draw(*Text(visible(text), style="dim").wrap(self._console, self._console.width))
        elif not self._is_quiet:
            self._print(Text(visible(text)))

    def progress(self, progress: TrainingProgress) -> None:
        """Show a log step in place of the last one and of any status."""
        self._progress = progress
        if self._live is not None:
            self._draw()
        elif not self._is_quiet:
            self._print(Text("  ".join(plain_parts(progress))))

    def note(self, text: str) -> None:
        """Print a line that stays."""
        _LOG.info("%s", visible(text))
        if not self._is_quiet:
            self._print_wrapped(text)

    def warn(self, text: str) -> None:
        """Print a line that stays and that a quiet command prints too, such as the number of skipped rows."""
        _LOG.warning("%s", visible(text))
        self._print_wrapped(text)

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Print a line with ``metrics`` of the test rows after ``step``."""
        parts = [Text(f"{metric_title(name)} {format_number(value)}") for name, value in metrics.items()]
        _LOG.info("test at step %d: %s", step, ", ".join(map(str, parts)))
        if not self._is_quiet:
            head = Text(f"test at step {step:,}", style="bold")
            for line in wrap_parts([head, *parts], self._width, gap=2):
                self._print(line)

    def show(self, *parts: RenderableType) -> None:
        """Print a result and remove the live region."""
        self.close()
        for part in parts:
            self._console.print(part, soft_wrap=True, highlight=False)

    def summary(self, summary: Summary) -> None:
        """Print how the run ended and what to do next, and remove the live region."""
        self.close()
        self._print(Text())
        lines = list(_summary_lines(summary))
        label_width = max(_LABEL_WIDTH, 1 + max(len(label) for label, _, _ in lines))
        for label, value, style in lines:
            # A command that continues in the next line must work when it is copied.
            more = " \\" if style == COMMAND_STYLE else ""
            parts = _wrap(visible(value), self._width - label_width, more)
            for head, part in zip((label, *[""] * len(parts)), parts, strict=False):
                labelled = Text(f"{head:<{label_width}}", style="dim")
                self._print(labelled.append(part, style=f"not dim {style}"))

    @property
    def _width(self) -> int:
        """Characters of a line: those of the terminal, and any number in a pipe or file."""
        return self._console.width if self._console.is_terminal else sys.maxsize

    def _print_wrapped(self, text: str) -> None:
        text = visible(text)
        indent = text[: len(text) - len(text.lstrip())]
        for line in _wrap(text.strip(), self._width - len(indent)):
            self._print(Text(indent + line))

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)

    def _draw(self, *below: RenderableType) -> None:
        assert self._live is not None
        above = [] if self._progress is None else live_lines(self._progress, self._console)
        self._live.update(Group(*above, *below), refresh=True)


@contextmanager
def passing_status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a status on stderr until the block ends, if stderr is a terminal."""
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    if not console.is_terminal:
        yield lambda text: None
        return
    with TerminalView(console) as view:
        yield view.status


def _summary_lines(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and style of each line."""
    if (metrics := summary.metrics) is not None:
        reachable = "" if summary.best_auc is None else f" (best reachable {format_number(summary.best_auc)})"
        first = f"{format_number(metrics[summary.score])} at step {summary.step:,}{reachable}"
        yield f"test {metric_title(summary.score)}", first, f"bold {DONE_STYLE}"
        for name, value in metrics.items():
            if name != summary.score:
                yield metric_title(name), format_number(value), ""
    else:
        yield f"test {metric_title(summary.score)}", "none: there are no test rows", ""
    best = summary.best if summary.best and summary.best.step != summary.step else None
    if best is not None:
        yield (
            f"best {metric_title(best.metric)}",
            f"{format_number(best.value)} at step {best.step:,}",
            f"bold {DONE_STYLE}",
        )
    if summary.unknown:
        yield "unknown values", unknown_fractions(summary.unknown), ""
    yield "throughput", f"{summary.samples_per_second:,.0f} samples/s", ""
    yield "run folder", str(summary.run_folder), ""
    yield "curves", str(summary.curves), ""
    last_folder = step_folder(summary.run_folder, summary.step)
    if best is None:
        yield "checkpoint", str(last_folder), ""
    else:
        best_folder = step_folder(summary.run_folder, best.step)
        yield "last checkpoint", f"{last_folder} (resume starts here)", ""
        yield "best checkpoint", f"{best_folder} (evaluate and predict use it)", ""
    if (profile := summary.profile) is not None:
        yield "profile", str(profile.folder), ""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in profile.shares.items())
        yield "a recorded step", f"{1e3 * profile.step_seconds:.1f} ms: {shares}", ""
    yield "resume", summary.resume, COMMAND_STYLE
    yield "evaluate", summary.evaluate, COMMAND_STYLE
    yield "predict", summary.predict, COMMAND_STYLE


def _wrap(text: str, width: int, more: str = "") -> list[str]:
    """Break a text at blanks into lines of ``width``; all but the last end with ``more``."""
    lines = textwrap.wrap(text, width - len(more), break_long_words=False, break_on_hyphens=False) or [""]
    return [*(line + more for line in lines[:-1]), lines[-1]]
