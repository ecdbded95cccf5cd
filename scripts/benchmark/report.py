"""Output of a benchmark: results.json, results.md, and tables in the terminal. Does not import torch."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmark.machine import origin_line
from benchmark.results import Disagreement, Failure, Measurement, Summary, failed_systems
from benchmark.tables import NONE, TextTable, mib, times
from hybrid.errors import ConfigError

JSON_FILE = "results.json"


def new_folder(output: Path | None, kind: str) -> Path:
    """Create the folder for results: ``output``, or one under ``runs/`` named by benchmark and time.

    Raises:
        ConfigError: it holds results already, or cannot be made.
    """
    folder = output or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    if (folder / JSON_FILE).exists():
        raise ConfigError("--output", "holds results already; choose another", str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--output", f"cannot be made: {error.strerror}", str(folder)) from error
    return folder


def write(
    folder: Path,
    title: str,
    origin: dict[str, Any],
    raw: Mapping[str, Any],
    notes: Sequence[str],
    tables: Sequence[TextTable],
) -> None:
    """Write both files; NaN and infinity become null in JSON.

    Args:
        raw: what results.json holds beside the origin.
        notes: paragraphs above the tables.
    """
    text = json.dumps(_finite({**origin, **raw}), indent=1, allow_nan=False)
    (folder / JSON_FILE).write_text(text + "\n", encoding="utf-8")
    paragraphs = [f"# {title}\n", origin_line(origin) + "\n", *(f"{note}\n" for note in notes)]
    parts = [*paragraphs, *(table.markdown() for table in tables)]
    (folder / "results.md").write_text("\n".join(parts), encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value


def show(console: Console, notes: Sequence[str], tables: Sequence[TextTable], folder: Path) -> None:
    """Print the results and their folder."""
    for table in tables:
        console.print()
        console.print(table.rich())
    for note in notes:
        console.print(note, markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False)


def raw_results(
    measurements: Sequence[Measurement],
    failures: Sequence[Failure],
    summaries: Sequence[Summary],
    found: Sequence[Disagreement],
) -> dict[str, Any]:
    """Return measurements and summaries, for JSON."""
    return {
        "summaries": [vars(s) for s in summaries],
        "failures": [vars(f) for f in failures],
        "disagreements": [vars(d) for d in found],
        "measurements": [m.as_dict() for m in measurements],
    }


def speed_table(
    workload: str,
    summaries: Sequence[Summary],
    failures: Sequence[Failure],
    titles: Mapping[str, str],
    baselines: Mapping[str, str],
    memory_of: str | None = None,
) -> TextTable:
    """Return samples per second, ratios and CPU time of all systems on one workload.

    Args:
        titles: titles of systems, by name.
        baselines: headers of the columns of ratios, by the baseline's name.
        memory_of: a role whose memory is an additional column.
    """
    header = ["system", "samples/s", "of each round", *baselines.values(), "CPU-s per million"]
    if memory_of is not None:
        header.append(f"MiB of a {memory_of}")
    table = TextTable(f"{workload}: speed", header)
    for s in summaries:
        if s.workload == workload:
            rounds = " ".join(f"{rate:,.0f}" for rate in s.rounds)
            ratios = [times(s.ratios.get(name)) for name in baselines]
            costs = [f"{s.cpu_seconds_per_million:.1f}"]
            if memory_of is not None:
                costs.append(mib(s.memory_bytes.get(memory_of)))
            table.rows.append([titles[s.system], f"{s.samples_per_second:,.0f}", rounds, *ratios, *costs])
    for failure in failures:
        if failure.workload == workload:
            table.rows.append([titles[failure.system], "FAILED", *[NONE] * (len(header) - 2)])
    return table


def loss_table(
    workload: str,
    summaries: Sequence[Summary],
    found: Sequence[Disagreement],
    titles: Mapping[str, str],
    synchronous: Sequence[str],
) -> TextTable:
    """Return the losses of all systems; those of synchronous systems must agree."""
    of_workload = [s for s in summaries if s.workload == workload]
    steps = list(dict.fromkeys(step for s in of_workload for step in s.losses))
    header = ("system", *(f"step {step}" if step.isdigit() else step for step in steps), "")
    table = TextTable(f"{workload}: losses", header)
    wrong = failed_systems(found, workload)
    for s in of_workload:
        verdict = "not synchronous"
        if s.system in synchronous:
            verdict = "WRONG" if s.system in wrong else "agrees"
        losses = [f"{s.losses[step]:.5f}" for step in steps]
        table.rows.append((titles[s.system], *losses, verdict))
    return table


def error_lines(failures: Sequence[Failure], found: Sequence[Disagreement]) -> list[str]:
    """Return a line for each failure, and one for the first wrong loss of each system on a workload."""
    firsts = {(d.workload, d.system): d for d in reversed(found)}
    wrong = [f"ERROR: {firsts[pair]}" for pair in dict.fromkeys((d.workload, d.system) for d in found)]
    return [*wrong, *(f"ERROR: {f.workload}: {f.message}" for f in failures)]
