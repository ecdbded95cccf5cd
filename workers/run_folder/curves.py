"""The curves of a run: loss, score, throughput, and the phases of a step."""

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


@contextmanager
def temporary_font_cache() -> Iterator[None]:
    """Let matplotlib write its font cache to a temporary folder, unless the user has set MPLCONFIGDIR."""
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
    """Draw the logged numbers into a PNG file.

    Args:
        score: the metric beside the loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [record for record in records if record["kind"] == "train"]
    test = [record for record in records if record["kind"] == "test"]
    loss_key = "log_loss" if not test or "log_loss" in test[0] else ""
    figure = Figure(figsize=(11, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    (loss, quality), (throughput, phases) = figure.subplots(2, 2)
    for axes, title in (
        (loss, "Log loss" if loss_key else "Loss"),
        (quality, metric_title(score)),
        (throughput, "Throughput (samples a second)"),
        (phases, "Time of a step by phase (%)"),
    ):
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.grid(axis="y", alpha=0.4)
        axes.locator_params(axis="x", integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_line(loss, train, "loss", "train")
    _draw_line(loss, test, loss_key, "test")
    _draw_line(quality, train, score, "train")
    _draw_line(quality, test, score, "test")
    _draw_line(throughput, train, "samples_per_second", "train")
    throughput.set_ylim(bottom=0)
    if train:
        shares: dict[str, list[float]] = {name: [] for name in train[0]["phase_seconds"]}
        for record in train:
            total = sum(record["phase_seconds"].values()) or 1.0
            for name, seconds in record["phase_seconds"].items():
                shares[name].append(100 * seconds / total)
        phases.stackplot([record["step"] for record in train], [*shares.values()], labels=[*shares])
        phases.set_ylim(0, 100)
        phases.legend(ncols=len(shares), loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize=8)
    with open(path, "wb", opener=open_file) as file:
        figure.savefig(file, format="png")


def _draw_line(axes: Axes, records: list[Record], key: str, label: str) -> None:
    """Draw a number over the steps, with a gap where it is unknown."""
    if not key or not records:
        return
    values: list[Any] = [math.nan if record[key] is None else record[key] for record in records]
    marker = "o" if len(records) < 30 else ""
    axes.plot([record["step"] for record in records], values, label=label, marker=marker, markersize=4)
    axes.legend(frameon=False)
