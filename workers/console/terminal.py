"""What a person sees of a run: a live region on a terminal, plain lines elsewhere. Free of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.config.task_sections import metric_title
from hybrid.storage.remote_path import StoragePath
from workers.console.data_notes import unknown_shares
from workers.console.escaping import visible
from workers.console.progress_lines import (
    COMMAND_STYLE,
    DONE_STYLE,
    Progress,
    flow,
    number,
    plain_line,
    region,
)

if TYPE_CHECKING:
    from hybrid.checkpoint.checkpoint_manifest import Best
    from hybrid.data.encode.unknown_values import UnknownValues
    from hybrid.metrics import Metrics

_LABEL_WIDTH = 20


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
        score: the metric that comes first.
        best: the best evaluation whose model is kept; None where none is.
        best_auc: AUC that no model can beat, where the data tell; else None.
        samples_per_second: over all trainers and the whole run.
        run_folder, curves: where the results are.
        profile: where that of the recorded steps is; None where none was recorded.
        resume, evaluate, predict: commands to go on with.
        unknown: values of the test rows that are unknown to the model, by column; empty where none can be.
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

    def __exit__(self, *_: object) -> None:
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
            self._draw(*Text(visible(text), style="dim").wrap(self._console, self._console.width))

    def progress(self, progress: Progress) -> None:
        """Show a log step; it takes the place of the one before and of any status."""
        self._progress = progress
        if self._live is None:
            self._print(Text("  ".join(plain_line(progress))))
        else:
            self._draw()

    def note(self, text: str) -> None:
        """Add a line that stays, such as how many bad rows were skipped."""
        text = visible(text)
        indent = text[: len(text) - len(text.lstrip())]
        for line in _lines_of_words(text.strip(), self._width - len(indent)):
            self._print(Text(indent + line))

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Add a line with those ``metrics`` on the test rows after ``step`` that are to be seen."""
        parts = [Text(f"{metric_title(name)} {number(value)}") for name, value in metrics.items()]
        for line in flow([Text(f"test at step {step:,}", style="bold"), *parts], self._width, gap=2):
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
        lines = list(_summary_lines(summary))
        label_width = max(_LABEL_WIDTH, 1 + max(len(label) for label, _, _ in lines))
        for label, value, style in lines:
            # A command that goes on in the next line says so: it is there to be copied.
            more = " \\" if style == COMMAND_STYLE else ""
            parts = _lines_of_words(visible(value), self._width - label_width, more)
            for head, part in zip((label, *[""] * len(parts)), parts, strict=False):
                labelled = Text(f"{head:<{label_width}}", style="dim")
                self._print(labelled.append(part, style=f"not dim {style}"))

    @property
    def _width(self) -> int:
        """Characters of a line: those of the terminal, and any number elsewhere."""
        return self._console.width if self._console.is_terminal else sys.maxsize

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)

    def _draw(self, *below: RenderableType) -> None:
        assert self._live is not None
        above = [] if self._progress is None else region(self._progress, self._console)
        self._live.update(Group(*above, *below), refresh=True)


@contextmanager
def passing_status() -> Iterator[Callable[[str], None]]:
    """In here, a command with nothing to show yet can say what it does: on stderr, if that is a terminal."""
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    if not console.is_terminal:
        yield lambda text: None
        return
    with TerminalView(console) as view:
        yield view.status


def _summary_lines(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Label, value and style of each line."""
    if (metrics := summary.metrics) is not None:
        reachable = "" if summary.best_auc is None else f" (best reachable {number(summary.best_auc)})"
        first = f"{number(metrics[summary.score])} at step {summary.step:,}{reachable}"
        yield f"test {metric_title(summary.score)}", first, f"bold {DONE_STYLE}"
        for name, value in metrics.items():
            if name != summary.score and not name.endswith("calibration"):
                yield metric_title(name), number(value), ""
    else:
        yield f"test {metric_title(summary.score)}", "none, there are no test rows", ""
    best = summary.best if summary.best and summary.best.step != summary.step else None
    if best is not None:
        yield (
            f"best {metric_title(best.metric)}",
            f"{number(best.value)} at step {best.step:,}",
            f"bold {DONE_STYLE}",
        )
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
    yield "resume", summary.resume, COMMAND_STYLE
    yield "evaluate", summary.evaluate, COMMAND_STYLE
    yield "predict", summary.predict, COMMAND_STYLE


def _lines_of_words(text: str, width: int, more: str = "") -> list[str]:
    """Text cut at blanks into lines of a width, which all but the last end with ``more``."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and len(longer) + len(more) > width:
            lines[-1] += more
            longer = word
            lines.append("")
        lines[-1] = longer
    return lines
