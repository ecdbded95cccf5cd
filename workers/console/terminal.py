"""The view of a run: a live region on a terminal, plain lines in a pipe or file. Does not import torch."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybrid.config.task_sections import metric_title
from workers.console.messages import Verbosity, verbosity, visible

if TYPE_CHECKING:
    from hybrid.metrics import Metrics

# Colors that are readable on black and on white.
DONE_STYLE = "color(29)"
COMMAND_STYLE = "color(31)"
_LABEL_WIDTH = 20
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """The state of a run at one log step."""

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
        style=f"dim {DONE_STYLE}",
        complete_style=DONE_STYLE,
        finished_style=DONE_STYLE,
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

    A terminal shows a live region. Plain lines replace it if ``console`` (default: stdout) is no terminal, or
    if the command is verbose, because log records would break the region.
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
        elif not self._is_quiet:
            self._print(Text(visible(text)))

    def progress(self, progress: TrainingProgress) -> None:
        """Show the progress in place of the last; without a live region, print a line unless quiet."""
        self._progress = progress
        if self._live is not None:
            self._draw()
        elif not self._is_quiet:
            pairs = [*_numbers(progress), *_phases(progress)]
            head = _position(progress)
            self._print(Text("  ".join([*head, *(f"{label} {value}" for label, value in pairs)])))

    def note(self, text: str) -> None:
        """Print a line that is not overwritten, unless the command is quiet."""
        _LOG.info("%s", visible(text))
        if not self._is_quiet:
            self._print(Text(visible(text)))

    def warn(self, text: str) -> None:
        """Print a line that is not overwritten, even if the command is quiet."""
        _LOG.warning("%s", visible(text))
        self._print(Text(visible(text)))

    def evaluation(self, split: str, step: int, metrics: Metrics) -> None:
        """Print the metrics of a split, or of a stream unit, after ``step``, unless the command is quiet."""
        numbers = "  ".join(f"{metric_title(name)} {format_number(value)}" for name, value in metrics.items())
        _LOG.info("%s at step %d: %s", split, step, numbers)
        if not self._is_quiet:
            self._print(
                Text(f"{split} at step {step:,}", style="bold").append(f"  {numbers}", style="not bold")
            )

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
            style = COMMAND_STYLE if label in commands else ""
            if label.startswith(("test ", "validation ", "best ")) and "checkpoint" not in label:
                style = f"bold {DONE_STYLE}"
            line = Text(f"{label:<{width}}", style="dim").append(visible(value), style=f"not dim {style}")
            # Soft wrap leaves line breaks to the terminal, so a copied command is complete.
            self._console.print(line, soft_wrap=True)

    def _print(self, line: Text) -> None:
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
