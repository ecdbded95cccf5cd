"""The progress of a run: a few lines of a live region, or one plain line. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybrid.config.task_sections import metric_title

if TYPE_CHECKING:
    from hybrid.protocol.update_rules import Staleness

# Colors that are readable on black and on white.
DONE_STYLE = "color(29)"
COMMAND_STYLE = "color(31)"
_MIN_BAR_WIDTH = 8


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
