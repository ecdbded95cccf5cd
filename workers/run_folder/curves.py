"""The curves of a run: loss, AUC, throughput, and where the time of a step goes."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.config.task_sections import metric_title
from hybrid.storage.private_files import open_file
from workers.run_folder.run_paths import scratch_write_errors
from workers.run_folder.run_state import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PHASE_COLOURS = {
    "data": "#e9c46a",
    "lookup": "#5fb0b7",
    "dense": "#7fb069",
    "backward": "#4a7bb7",
    "update": "#b56576",
}
# Of the four in the figure; matplotlib would draw it twice to find them.
_PLACES = {"left": 0.06, "right": 0.98, "bottom": 0.11, "top": 0.95, "wspace": 0.13, "hspace": 0.3}


@contextmanager
def temporary_font_cache() -> Iterator[None]:
    """Use matplotlib in here: its font cache then goes to a folder that is deleted again.

    Where the user has set MPLCONFIGDIR, that folder is used.
    """
    if "MPLCONFIGDIR" in os.environ:
        yield
        return
    with ExitStack() as stack:
        with scratch_write_errors():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="matplotlib-"))
        os.environ["MPLCONFIGDIR"] = folder
        try:
            yield
        finally:
            del os.environ["MPLCONFIGDIR"]


@temporary_font_cache()
def draw_curves(records: list[Record], path: Path, score: str = "auc") -> None:
    """Draw what has been logged into a PNG file.

    Args:
        score: the metric beside the loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [record for record in records if record["kind"] == "train"]
    test = [record for record in records if record["kind"] == "test"]
    has_log_loss = not test or "log_loss" in test[0]
    figure = Figure(figsize=(11, 7), dpi=120)
    FigureCanvasAgg(figure)
    (loss, quality), (throughput, shares) = figure.subplots(2, 2, gridspec_kw=_PLACES)
    for axes, title, train_key, test_key in (
        (loss, "Log loss" if has_log_loss else "Loss", "loss", "log_loss" if has_log_loss else None),
        (quality, metric_title(score), score, score),
        (throughput, "Throughput (thousand samples a second)", "samples_per_second", None),
    ):
        _style(axes, title)
        scale = 1e-3 if axes is throughput else 1.0
        _line(axes, train, train_key, scale, color="#7a9cc6", linewidth=1.4, label="train")
        if test and test_key is not None:
            _line(axes, test, test_key, scale, color="#c8553d", linewidth=1.8, marker="o", label="test")
            axes.legend(frameon=False)
    throughput.set_ylim(bottom=0, top=throughput.get_ylim()[1] * 1.1)
    _style(shares, "Where the time of a step goes (%)")
    _stack_phases(shares, train)
    last_step = max((record["step"] for record in records), default=1)
    for axes in figure.axes:
        axes.set_xlim(0, last_step * 1.02)
    with open(path, "wb", opener=open_file) as file:
        figure.savefig(file, format="png")


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color="#666666")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(colors="#666666", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")


def _line(axes: Axes, records: list[Record], key: str, scale: float, **style: Any) -> None:
    """Draw ``key`` over steps, with a gap where it is unknown; few points get markers."""
    values = [math.nan if record[key] is None else record[key] * scale for record in records]
    style.setdefault("marker", "." if len(records) < 30 else "")
    axes.plot([record["step"] for record in records], values, **style)


def _stack_phases(axes: Axes, records: list[Record]) -> None:
    if not records:
        return
    steps = [record["step"] for record in records]
    totals = [sum(record["phase_seconds"].values()) or 1.0 for record in records]
    phases = list(records[0]["phase_seconds"])
    rows = [
        [100 * record["phase_seconds"][phase] / total for record, total in zip(records, totals, strict=True)]
        for phase in phases
    ]
    axes.stackplot(steps, rows, labels=phases, colors=[_PHASE_COLOURS[phase] for phase in phases])
    axes.set_ylim(0, 100)
    axes.legend(
        frameon=False,
        ncols=len(phases),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.5,
    )
