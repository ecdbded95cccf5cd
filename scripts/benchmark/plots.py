"""Plots of results: colours that colour-blind people can tell apart (Okabe and Ito, 2008)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from benchmark.results import Measurement, Summary
from benchmark.tables import times
from workers.run_folder.curves import temporary_font_cache

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#777777"
_FAMILIES = {"ours": BLUE, "one-process": ORANGE, "tutorial": PINK, "torchrec": GREEN}
_TEXT = "#333333"


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on, which is written at the end of the block."""
    with temporary_font_cache():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        drawn = Figure(figsize=(width, height), dpi=120, layout=engine)
        FigureCanvasAgg(drawn)
        yield drawn
        drawn.savefig(path)


def style(axes: Axes, title: str) -> None:
    """What all panels have alike."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_axisbelow(True)
    axes.tick_params(colors=_TEXT, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")


def draw_comparison(
    summaries: Sequence[Summary],
    titles: Mapping[str, str],
    baselines: Mapping[str, str],
    note: str,
    path: Path,
) -> None:
    """One panel a workload: bars of samples a second, a dot a round; ratios and CPU time beside them."""
    panels = [
        [s for s in summaries if s.workload == name] for name in dict.fromkeys(s.workload for s in summaries)
    ]
    if not panels:
        return
    heights = [len(panel) for panel in panels]
    with figure(path, 11, 0.36 * sum(heights) + 1.2 * len(panels) + 0.4) as drawn:
        shape = {"height_ratios": heights, "width_ratios": (1.0, 0.13 * (len(baselines) + 2))}
        rows = drawn.subplots(len(panels), 2, squeeze=False, sharey="row", gridspec_kw=shape)
        for (bars, cells), panel in zip(rows, panels, strict=True):
            _draw_bars(bars, panel, titles)
            _write_cells(cells, panel, baselines)
        drawn.supxlabel(note, fontsize=8, color=_TEXT, wrap=True)


def _draw_bars(axes: Axes, panel: Sequence[Summary], titles: Mapping[str, str]) -> None:
    style(axes, f"{panel[0].workload}: samples a second")
    rates = [s.samples_per_second for s in panel]
    axes.barh(range(len(panel)), rates, color=[_colour(s.system) for s in panel], height=0.66)
    rounds = [(rate, position) for position, s in enumerate(panel) for rate in s.rounds]
    axes.plot(*zip(*rounds, strict=True), "o", color="white", mec="black", mew=0.8, markersize=4)
    axes.set_yticks(range(len(panel)), [titles[s.system] for s in panel])
    axes.set_ylim(len(panel) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)


def _write_cells(axes: Axes, panel: Sequence[Summary], baselines: Mapping[str, str]) -> None:
    """Numbers beside the bars, in the same rows."""
    axes.set_axis_off()
    header = ["samples/s", "CPU-s per million", *baselines.values()]
    place = axes.get_yaxis_transform()
    for column, name in enumerate(header):
        right = (column + 1) / len(header)
        axes.text(right, -0.6, fill(name, 11), transform=place, ha="right", va="bottom", fontsize=8)
        for position, s in enumerate(panel):
            ratios = [times(s.ratios.get(baseline)) for baseline in baselines]
            cell = [f"{s.samples_per_second:,.0f}", f"{s.cpu_seconds_per_million:.1f}", *ratios][column]
            axes.text(right, position, cell, transform=place, ha="right", va="center", fontsize=9)


def _colour(system: str) -> str:
    return next((c for family, c in _FAMILIES.items() if system.startswith(family)), GREY)


def draw_scaling(series: Mapping[str, Mapping[int, Measurement]], path: Path) -> None:
    """One panel for each thing that grows: seconds for a million samples, by who spends them."""
    drawable = {dimension: of for dimension, of in series.items() if of}
    if not drawable:
        return
    columns = min(3, len(drawable))
    rows = -(-len(drawable) // columns)
    with figure(path, 4.2 * columns, 3.6 * rows + 0.5) as drawn:
        panels = drawn.subplots(rows, columns, squeeze=False, sharey=True).flat
        for axes, (dimension, of) in zip(panels, drawable.items(), strict=False):
            _draw_lines(axes, dimension, of)
        for axes in list(panels)[len(drawable) :]:
            axes.set_visible(False)
        drawn.axes[0].set_ylabel("seconds for a million samples", color=_TEXT)
        handles, labels = drawn.axes[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _draw_lines(axes: Axes, dimension: str, series: Mapping[int, Measurement]) -> None:
    from matplotlib.ticker import LogLocator

    style(axes, dimension)
    values = list(series)
    lines = {
        "wall clock": ([m.of_a_million(m.seconds) for m in series.values()], GREY, "s", "--"),
        "CPU, all": ([m.cpu_seconds_per_million for m in series.values()], BLUE, "o", "-"),
        "CPU, trainers": (_of_role(series, "trainer"), ORANGE, "^", "-"),
        "CPU, workers": (_of_role(series, "worker"), GREEN, "v", "-"),
    }
    for label, (costs, colour, marker, dashes) in lines.items():
        axes.plot(values, costs, color=colour, marker=marker, linestyle=dashes, label=label, markersize=5)
    axes.set_xscale("log", base=10)
    axes.set_yscale("log", base=10)
    axes.minorticks_off()
    axes.set_xticks(values, [f"{value:,}" for value in values], fontsize=8)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(color="#e4e4e4", linewidth=0.8)


def _of_role(series: Mapping[int, Measurement], role: str) -> list[float]:
    return [m.of_a_million(m.cpu_seconds[role]) for m in series.values()]


def draw_surface(points: Sequence[tuple[str, float, float]], path: Path) -> None:
    """A dot a point, by name, speed and cost; the ten dearest are named below by their numbers."""
    from matplotlib.ticker import LogLocator

    if not points:
        return
    dearest = sorted(points, key=lambda point: -point[2])
    with figure(path, 9, 7.5) as drawn:
        axes = drawn.subplots()
        style(axes, "This project beside others, a dot a shape")
        axes.plot([p[1] for p in points], [p[2] for p in points], "o", color=BLUE, alpha=0.6, markersize=6)
        for number, (_, speed, cost) in enumerate(dearest[:10], 1):
            axes.annotate(str(number), (speed, cost), (5, 3), textcoords="offset points", fontsize=8)
        for line in (axes.axhline, axes.axvline):
            line(1.0, color=GREY, linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(base=2, subs=(1.0, 2**0.5)))
            axis.set_major_formatter(lambda value, _: f"{value:.2g}")
        axes.set_xlabel("samples a second, over TorchRec's (pipelined); to the right is better")
        axes.set_ylabel("CPU-seconds a sample, over the best single process; down is better")
        axes.grid(color="#e4e4e4", linewidth=0.8)
        lines = [f"{n}  {name}" for n, (name, _, _) in enumerate(dearest[:10], 1)]
        drawn.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=8, color=_TEXT)
