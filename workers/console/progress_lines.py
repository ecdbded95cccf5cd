"""How far a run has come: three lines of a live region, or one plain line. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from hybrid.config.task_sections import metric_title

if TYPE_CHECKING:
    from hybrid.protocol.update_rules import Staleness

# Colours that stand out from black and from white, and what takes their place where there are none.
DONE_STYLE = "color(29)"
COMMAND_STYLE = "color(31)"
PHASE_STYLES = {
    "data": "color(136)",
    "lookup": "color(31)",
    "dense": "color(64)",
    "backward": "color(68)",
    "update": "color(133)",
}
_GLYPHS = dict(zip(PHASE_STYLES, "·░▒▓█", strict=True))
_ASCII_GLYPHS = dict(zip(PHASE_STYLES, ".-+=#", strict=True))
_STACK_WIDTH = 20
_SHORTEST_BAR = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is, as of one log step.

    Attributes:
        step, total_steps, epoch, epochs: counted from 1.
        loss, score: over the samples since the last log step; NaN where unknown.
        score_name: which metric ``score`` is.
        samples_per_second: over all trainers, since the last log step.
        seconds_left: until the last step; NaN where unknown.
        phase_seconds: time since the last log step by phase (``hybrid.primitives.step_timings.PHASES``).
        staleness: of the updates of tables since the last log step; None where it is zero by design.
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
        """Share of the step's time by phase; shares add up to 1 unless no time was spent."""
        total = sum(self.phase_seconds.values()) or 1.0
        return {phase: seconds / total for phase, seconds in self.phase_seconds.items()}


def region(progress: Progress, console: Console) -> list[Text]:
    """The bar, the numbers, and where the time goes; each takes more lines where the terminal is narrow."""
    numbers = [
        Text(f"{label} ", style="dim").append(value, style="not dim bold")
        for label, value in (
            ("loss", number(progress.loss)),
            (metric_title(progress.score_name), number(progress.score)),
            ("samples/s", f"{progress.samples_per_second:,.0f}"),
            ("left", clock(progress.seconds_left)),
            *([] if progress.staleness is None else [("staleness", staleness_text(progress.staleness))]),
        )
    ]
    return [
        *_bar(progress, console),
        *flow(numbers, console.width, gap=3),
        *flow([*_phases(progress.phase_shares, console)], console.width, gap=2),
    ]


def flow(parts: Sequence[Text], width: int, gap: int) -> list[Text]:
    """Parts one after the other, in as many lines as it takes to cut none of them."""
    lines = [parts[0].copy()]
    for part in parts[1:]:
        if len(lines[-1]) + gap + len(part) <= width:
            lines[-1].append(" " * gap).append_text(part)
        else:
            lines.append(part.copy())
    return lines


def _bar(progress: Progress, console: Console) -> list[Text]:
    before = Text(f"epoch {progress.epoch}/{progress.epochs}")
    after = Text(f"step {progress.step:,}/{progress.total_steps:,}")
    width = console.width - len(before) - len(after) - 2
    if width < _SHORTEST_BAR:
        return flow([before, after], console.width, gap=1)
    # Told apart by their form too, since colours may be few, none, or the background's own.
    done, left = "=-" if console.options.ascii_only else "━─"
    reached = width * progress.step // max(progress.total_steps, 1)
    bar = Text(done * reached, style=DONE_STYLE).append(left * (width - reached), style=f"dim {DONE_STYLE}")
    return [before.append(" ").append_text(bar).append(" ").append_text(after)]


def _phases(shares: Mapping[str, float], console: Console) -> Iterator[Text]:
    """Where the time of a step goes: a bar with a length by phase, then its legend."""
    is_ascii = console.options.ascii_only
    has_colours = console.color_system is not None and not console.no_color
    plain = "-" if is_ascii else "━"
    glyphs = dict.fromkeys(shares, plain) if has_colours else _ASCII_GLYPHS if is_ascii else _GLYPHS
    bar = Text()
    drawn = reached = 0.0
    for phase, share in shares.items():
        reached += share * _STACK_WIDTH
        bar.append(glyphs[phase] * (round(reached) - round(drawn)), style=PHASE_STYLES[phase])
        drawn = reached
    yield bar
    for phase, share in shares.items():
        key = "" if has_colours else f"{glyphs[phase]} "
        yield Text(f"{key}{phase} {share:.0%}", style=PHASE_STYLES[phase])


def plain_line(progress: Progress) -> Iterator[str]:
    """The parts of a line for what is no terminal."""
    yield f"step {progress.step}/{progress.total_steps}"
    yield f"epoch {progress.epoch}/{progress.epochs}"
    yield f"loss {number(progress.loss)}"
    yield f"{metric_title(progress.score_name)} {number(progress.score)}"
    yield f"{progress.samples_per_second:,.0f} samples/s"
    yield f"left {clock(progress.seconds_left)}"
    if progress.staleness is not None:
        yield f"staleness {staleness_text(progress.staleness)}"
    yield " ".join(f"{phase} {share:.0%}" for phase, share in progress.phase_shares.items())


def number(value: float) -> str:
    """Four places."""
    return "unknown" if math.isnan(value) else f"{value:.4f}"


def staleness_text(staleness: Staleness) -> str:
    """Mean and largest number of updates that rows were behind."""
    return f"{staleness.mean:.2f} (at most {staleness.largest})"


def clock(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` under an hour."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
