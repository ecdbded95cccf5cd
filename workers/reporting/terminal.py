"""What a person sees of a run: a live region on a terminal, plain lines elsewhere. Free of torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybrid.manifest import step_folder
from workers.reporting.data_notes import unknown_shares
from workers.reporting.visible import visible

if TYPE_CHECKING:
    from hybrid.data.unknown import UnknownValues
    from hybrid.manifest import Best
    from hybrid.metrics import Metrics
    from hybrid.update import Staleness

_PHASE_STYLES = {
    "data": "yellow",
    "lookup": "cyan",
    "dense": "green",
    "backward": "blue",
    "update": "magenta",
}
_STACK_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is, as of one log step.

    Attributes:
        step, total_steps, epoch, epochs: counted from 1.
        loss, auc: over the samples since the last log step; NaN where unknown.
        samples_per_second: over all trainers, since the last log step.
        seconds_left: until the last step; NaN where unknown.
        phase_seconds: time since the last log step by phase (``hybrid.clock.PHASES``).
        staleness: of the updates of tables since the last log step; None where it is zero by design.
    """

    step: int
    total_steps: int
    epoch: int
    epochs: int
    loss: float
    auc: float
    samples_per_second: float
    seconds_left: float
    phase_seconds: Mapping[str, float]
    staleness: Staleness | None = None

    @property
    def phase_shares(self) -> dict[str, float]:
        """Share of the step's time by phase; shares add up to 1 unless no time was spent."""
        total = sum(self.phase_seconds.values()) or 1.0
        return {phase: seconds / total for phase, seconds in self.phase_seconds.items()}


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """What to say of the steps that were recorded.

    Attributes:
        folder: where trace and table are.
        step_seconds: how long one takes.
        shares: of what takes most of it.
    """

    folder: Path
    step_seconds: float
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What to say at the end of a run.

    Attributes:
        metrics, step: on the test rows, at the last step; which that is. None where there are no such rows.
        best: the best evaluation whose model is kept; None where none is.
        best_auc: AUC that no model can beat, where the data tell; else None.
        samples_per_second: over all trainers and the whole run.
        run_folder, curves: where the results are.
        profile: where that of the recorded steps is; None where none was recorded.
        resume, evaluate, predict: commands to go on with.
        unknown: values of the test rows that are unknown to the model, by column; empty where none can be.
    """

    metrics: Metrics | None
    step: int
    best: Best | None
    best_auc: float | None
    samples_per_second: float
    run_folder: Path
    curves: Path
    resume: str
    evaluate: str
    predict: str
    profile: ProfileSummary | None = None
    unknown: Sequence[UnknownValues] = ()


class TerminalView:
    """Shows a run while the ``with`` block lasts.

    Args:
        console: where to; by default stdout, as plain lines unless it is a terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        # Refreshed by hand, so that no thread draws.
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if is_live else None
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal to others; the live region goes."""
        if self._live is not None:
            self._live.stop()

    def status(self, text: str) -> None:
        """Say what is going on between steps, such as waiting for roles or saving a checkpoint."""
        if self._live is None:
            self._print(Text(visible(text)))
        else:
            self._draw(Text(visible(text), style="dim", no_wrap=True, overflow="ellipsis"))

    def progress(self, progress: Progress) -> None:
        """Show a log step; it takes the place of the one before and of any status."""
        self._progress = progress
        if self._live is None:
            self._print(Text("  ".join(_plain_progress(progress))))
        else:
            self._draw()

    def note(self, text: str) -> None:
        """Add a line that stays, such as how many bad rows were skipped."""
        self._print(Text(visible(text)))

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Add a line with the metrics on the test rows after ``step``."""
        line = Text(f"test at step {step:,}  ", style="bold")
        line.append(
            f"AUC {_number(metrics.auc)}  log loss {_number(metrics.log_loss)}  "
            f"normalised entropy {_number(metrics.normalised_entropy)}  "
            f"calibration {_number(metrics.calibration)}",
            style="not bold",
        )
        self._print(line)

    def show(self, *parts: RenderableType) -> None:
        """Print a result; the live region goes."""
        self.close()
        for part in parts:
            self._console.print(part, soft_wrap=True, highlight=False)

    def summary(self, summary: Summary) -> None:
        """Say how the run ended and what to do next; the live region goes."""
        self.close()
        self._print(Text())
        for label, value, style in _summary_lines(summary):
            self._print(Text(f"{label:<20}", style="dim").append(visible(value), style=f"not dim {style}"))

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)

    def _draw(self, *below: RenderableType) -> None:
        assert self._live is not None
        above = [] if self._progress is None else _region(self._progress, self._console)
        self._live.update(Group(*above, *below), refresh=True)


def _region(progress: Progress, console: Console) -> list[RenderableType]:
    """Three lines: the bar, the numbers, and where the time goes."""
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        f"epoch {progress.epoch}/{progress.epochs}",
        ProgressBar(total=progress.total_steps, completed=progress.step, complete_style="green"),
        f"step {progress.step:,}/{progress.total_steps:,}",
    )
    numbers = Text(no_wrap=True, overflow="ellipsis")
    for label, value in (
        ("loss", _number(progress.loss)),
        ("AUC", _number(progress.auc)),
        ("samples/s", f"{progress.samples_per_second:,.0f}"),
        ("left", _clock(progress.seconds_left)),
        *([] if progress.staleness is None else [("staleness", _staleness(progress.staleness))]),
    ):
        numbers.append(f"{label} ", style="dim").append(f"{value}   ", style="bold")
    return [bar, numbers, _stacked_bar(progress.phase_shares, "-" if console.options.ascii_only else "━")]


def _stacked_bar(shares: Mapping[str, float], glyph: str) -> Text:
    """Where the time of a step goes: a bar with a length by phase, and its legend."""
    bar, legend = Text(no_wrap=True, overflow="ellipsis"), Text()
    drawn = reached = 0.0
    for phase, share in shares.items():
        style = _PHASE_STYLES[phase]
        reached += share * _STACK_WIDTH
        bar.append(glyph * (round(reached) - round(drawn)), style=style)
        drawn = reached
        legend.append(f"  {phase} {share:.0%}", style=style)
    return bar.append_text(legend)


def _plain_progress(progress: Progress) -> Iterator[str]:
    yield f"step {progress.step}/{progress.total_steps}"
    yield f"epoch {progress.epoch}/{progress.epochs}"
    yield f"loss {_number(progress.loss)}"
    yield f"AUC {_number(progress.auc)}"
    yield f"{progress.samples_per_second:,.0f} samples/s"
    yield f"left {_clock(progress.seconds_left)}"
    if progress.staleness is not None:
        yield f"staleness {_staleness(progress.staleness)}"
    yield " ".join(f"{phase} {share:.0%}" for phase, share in progress.phase_shares.items())


def _summary_lines(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Label, value and style of each line."""
    if (metrics := summary.metrics) is not None:
        reachable = "" if summary.best_auc is None else f" (best reachable {_number(summary.best_auc)})"
        yield "test AUC", f"{_number(metrics.auc)} at step {summary.step:,}{reachable}", "bold green"
        yield "log loss", _number(metrics.log_loss), ""
        yield "normalised entropy", _number(metrics.normalised_entropy), ""
    else:
        yield "test AUC", "none, there are no test rows", ""
    best = summary.best if summary.best and summary.best.step != summary.step else None
    if best is not None:
        name = "AUC" if best.metric == "auc" else best.metric.replace("_", " ")
        yield f"best {name}", f"{_number(best.value)} at step {best.step:,}", "bold green"
    if summary.unknown:
        yield "unknown values", unknown_shares(summary.unknown), ""
    yield "throughput", f"{summary.samples_per_second:,.0f} samples/s", ""
    yield "run folder", str(summary.run_folder), ""
    yield "curves", str(summary.curves), ""
    last_folder = step_folder(summary.run_folder, summary.step)
    if best is None:
        yield "checkpoint", str(last_folder), ""
    else:
        best_folder = step_folder(summary.run_folder, best.step)
        yield "last checkpoint", f"{last_folder} (resume goes on from it)", ""
        yield "best checkpoint", f"{best_folder} (evaluate and predict take it)", ""
    if (profile := summary.profile) is not None:
        yield "profile", str(profile.folder), ""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in profile.shares.items())
        yield "a recorded step", f"{1e3 * profile.step_seconds:.1f} ms: {shares}", ""
    yield "resume", summary.resume, "cyan"
    yield "evaluate", summary.evaluate, "cyan"
    yield "predict", summary.predict, "cyan"


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.4f}"


def _staleness(staleness: Staleness) -> str:
    """Mean and largest number of updates that rows were behind."""
    return f"{staleness.mean:.2f} (at most {staleness.largest})"


def _clock(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` under an hour."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
