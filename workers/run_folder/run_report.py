"""The page ``report.html`` of a run: result, curves, unknown values, tables, restarts and configuration.

``hybrid report`` writes a page of several runs, which begins with their results side by side. The page has
no scripts and loads nothing. Every value is escaped, since names come from files. This module does not import
torch.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid.config import RunConfig
from hybrid.config.data_sections import SPLITS, TRAIN
from hybrid.config.loading import key_values, to_toml
from hybrid.config.task_sections import main_metric, metric_title, shown_metrics
from hybrid.loggers.record_file import NO_NUMBERS, Record
from workers.console import format_number, print_line, visible
from workers.run_folder.run_access import UNKNOWN_FRACTION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = tuple(f"#0000f{number}" for number in range(1, 7))  # stand for the variables --c1 to --c6
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")


class ReportedRun(NamedTuple):
    """The content of a report on one run."""

    name: str
    config: RunConfig
    records: Sequence[Record]  # of metrics.jsonl
    restarts: Sequence[Mapping[str, Any]]  # of restarts.jsonl
    result: Mapping[str, Any]  # of result.json; for a run without a result, at most its tables


def report_page(runs: Sequence[ReportedRun]) -> str:
    """Return the page of one or several runs as HTML."""
    parts = [_comparison(runs)] if len(runs) > 1 else []
    title = _cell([run.name for run in runs])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n"
        f"<main>\n{''.join([*parts, *map(_content, runs, count())])}</main>\n</html>\n"
    )


def _comparison(runs: Sequence[ReportedRun]) -> str:
    names = [run.name for run in runs]
    results = [dict(_flat(_numbers(run.result))) for run in runs]
    keys = [{f"{section}.{key}": value for section, key, _, value in key_values(run.config)} for run in runs]
    rows = [(key, *(each.get(key) for each in results)) for key in dict.fromkeys(chain(*results))]
    headings = names
    if len(runs) > 2:
        headings = [*names, "mean", "deviation"]
        rows = [(*row, *(_mean_and_deviation(row[1:]) or ("", ""))) for row in rows]
    settings = [(key, *(each.get(key) for each in keys)) for key in dict.fromkeys(chain(*keys))]
    different = [row for row in settings if any(value != row[1] for value in row[2:])]
    return (
        f"<h1>{len(runs)} runs</h1>\n<h2>Results</h2>\n{_table(rows, '', *headings)}"
        f"<h2>Keys that differ</h2>\n{_table(different, '', *names)}"
    )


def print_means(
    config: RunConfig, results: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """Print and return "mean" and "deviation" of each test metric; both None if a run lacks the metric."""
    means: dict[str, dict[str, float | None]] = {}
    print_line("")
    names = [name for name in shown_metrics(config.all_tasks) if any(name in each for each in results)]
    heading = f"mean and standard deviation of {len(results)} runs on their test rows"
    print_line(heading if names else "no mean of test metrics: the runs have no test rows")
    for name in names:
        found = _mean_and_deviation([each.get(name) for each in results])
        means[name] = dict(zip(("mean", "deviation"), found or (None, None), strict=True))
        value = "unknown" if found is None else " ± ".join(map(format_number, found))
        print_line(f"{metric_title(name):<20}{value}")
    return means


def _mean_and_deviation(values: Sequence[Any]) -> tuple[float, float] | None:
    if not all(type(value) in (int, float) for value in values):
        return None
    return statistics.fmean(values), statistics.stdev(values)


def _numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in result.items() if k not in ("tables", "unknown_values")}


def _content(run: ReportedRun, number: int) -> str:
    name, config, records, restarts, result = run
    last = {record["kind"]: record for record in records}
    state = "finished" if "steps" in result else "stopped without a result"
    ended = f"{state} at step {records[-1]['step']:,}, {_date(records[-1])}" if records else state
    progress = {k: v for k, v in last.get(TRAIN, {}).items() if k not in (*NO_NUMBERS, "time")}
    numbers = _numbers(result) or progress
    fractions = {k: v for record in last.values() for k, v in record.items() if k.endswith(UNKNOWN_FRACTION)}
    unknown = sorted(fractions.items(), key=lambda each: -each[1])
    tables = [
        (name, table["rows"] or "grows", table["dim"], f"{table['bytes'] / 2**20:,.1f}", table["workers"])
        for name, table in result.get("tables", {}).items()
    ]
    failures = [
        (_date(each), *(each.get(key) for key in ("cause", "step", "resumed_step", "message")))
        for each in restarts
    ]
    curves = "".join(
        f"<figure><figcaption>{escape(visible(title))}</figcaption>{svg}</figure>\n"
        for title, svg in _curves(config, records, number)
    )
    sections = {
        "Result": _pairs(_flat(numbers)),
        "Curves": f'<div class="curves">{curves}</div>\n' if curves else "",
        "Unknown values": _pairs((k.removesuffix(UNKNOWN_FRACTION), f"{v:.2%}") for k, v in unknown),
        "Tables": _table(tables, "table", "rows", "dim", "MiB", "workers"),
        "Restarts": _table(failures, "time", "cause", "at step", "resumed from", "message"),
    }
    content = "".join(f"<h2>{heading}</h2>\n{part}" for heading, part in sections.items() if part)
    return (
        f"<h1>{_cell(name)}</h1>\n<p>{ended}</p>\n{content}<h2>Configuration</h2>\n"
        f"<details><summary>every key</summary>\n<pre>{escape(to_toml(config))}</pre></details>\n"
    )


def _pairs(pairs: Iterable[tuple[str, object]]) -> str:
    items = [f"<div><dt>{_cell(name)}</dt><dd>{_cell(value)}</dd></div>\n" for name, value in pairs]
    return f"<dl>\n{''.join(items)}</dl>\n" if items else ""


def _table(rows: Sequence[Sequence[object]], *headings: str) -> str:
    head = "".join(f"<th>{_cell(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}</table></div>\n' if rows else ""


def _cell(value: object) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if isinstance(value, float):
        value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"
    return escape(visible(f"{value:,}" if type(value) is int else "none" if value is None else str(value)))


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (title, value) of each value in nested mappings, except None; titles start with ``before``."""
    for name, value in values.items():
        title = before + metric_title(name)
        if isinstance(value, Mapping):
            yield from _flat(value, f"{title} ")
        elif value is not None:
            yield title, value


def _date(record: Mapping[str, Any]) -> str:
    return f"{datetime.fromtimestamp(record.get('time', 0), UTC):%Y-%m-%d %H:%M:%S} UTC"


def _curves(config: RunConfig, records: Sequence[Record], number: int) -> Iterator[tuple[str, str]]:
    train, *unseen = by_kind = [
        (kind, [each for each in records if each["kind"] == kind]) for kind in (*SPLITS, "unit")
    ]
    if not any(of_kind for _, of_kind in by_kind):
        return
    score = main_metric(config.all_tasks)
    evaluated = [record for _, of_kind in unseen for record in of_kind]
    loss = "log_loss" if not evaluated or "log_loss" in evaluated[0] else ""
    plots = {
        "Log loss" if loss else "Loss": [(*train, "loss"), *((*each, loss) for each in unseen)],
        metric_title(score): [(*each, score) for each in by_kind],
        "Throughput (samples a second)": [(*train, "samples_per_second")],
    }
    for title, lines in plots.items():
        yield title, _svg(partial(_draw_lines, lines), f"{number} {title}")
    if train[1]:
        title = "Time of a step by phase (%)"
        yield title, _svg(partial(_draw_phases, train[1]), f"{number} {title}")


def _svg(draw: Callable[[Axes], None], salt: str) -> str:
    """Return a plot in the colors of the page. ``salt`` makes its ids unique in the page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()  # without a file matplotlibrc of the working directory
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": salt, "text.parse_math": False})
    figure = Figure(figsize=(4.8, 2.8), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.set_prop_cycle(color=_COLORS)
    axes.set_xlabel("step")
    axes.grid(axis="y", alpha=0.4)
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    content = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(content, format="svg", transparent=True, metadata=no_metadata)
    svg = content.getvalue().partition("<svg")[2].replace("#000000", "currentColor")
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"| id="[\w.]+_\d+"', "", svg)
    return "<svg" + re.sub("#0000f([1-6])", r"var(--c\1)", svg)


def _draw_lines(lines: Sequence[tuple[str, Sequence[Record], str]], axes: Axes) -> None:
    """Plot the number ``key`` of the records over the steps, for each (label, records, key) in ``lines``."""
    for label, records, key in lines:
        if key and records:
            values = [math.nan if (value := record.get(key)) is None else value for record in records]
            marker = "o" if len(records) < 30 else ""
            axes.plot([each["step"] for each in records], values, label=label, marker=marker, markersize=4)
    if len(lines) > 1 and axes.lines:
        axes.legend(frameon=False)
    else:
        axes.set_ylim(bottom=0)


def _draw_phases(records: Sequence[Record], axes: Axes) -> None:
    seconds = [record.get("phase_seconds", {}) for record in records]
    percentages = {
        visible(name): [100 * each.get(name, 0.0) / (sum(each.values()) or 1.0) for each in seconds]
        for name in dict.fromkeys(name for each in seconds for name in each)
    }
    axes.stackplot([each["step"] for each in records], [*percentages.values()], labels=[*percentages])
    axes.set_ylim(0, 100)
    axes.legend(ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=8, frameon=False)
