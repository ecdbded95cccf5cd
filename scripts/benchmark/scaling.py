"""``scripts/bench scaling``: the cost of a sample as one thing grows at a time, all others at a base shape.

The base shape: 2 trainers with 512 samples each, 2 workers, 16 tables of 20,000 rows and width 16, one id a
feature, the dense net of W2, updates pipelined. Each trainer keeps its 512 samples where trainers grow, and
all rows together stay as many where tables grow.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmark import report
from benchmark.job import Job
from benchmark.machine import origin
from benchmark.plots import draw_scaling
from benchmark.results import Measurement, split
from benchmark.rounds import Task, measured
from benchmark.systems import OURS_PIPELINED, OWN_PYTHON
from benchmark.tables import TextTable, mib
from benchmark.workloads import Workload

_ROWS, _TABLES = 320_000, 16
BASE = Workload(
    "base",
    (_ROWS // _TABLES,) * _TABLES,
    dim=16,
    hotness=1,
    trainer_batch=512,
    dense={"net": "benchmark.workloads:concatenation"},
)
VALUES = {
    "trainers": (1, 2, 4, 8),
    "workers": (1, 2, 4, 8),
    "tables": (8, 32, 128, 512, 1000),
    "rows": (100_000, 1_000_000, 10_000_000, 50_000_000),
    "dim": (8, 16, 32, 64, 128),
    "hotness": (1, 4, 16, 64),
}
_WARM_UP_STEPS = 20  # all batches once
_LEAST_STEPS = 20


@dataclass(frozen=True)
class Point:
    """The base shape with one thing grown."""

    dimension: str
    value: int

    @property
    def workload(self) -> Workload:
        name = f"{self.dimension} {self.value:,}"
        return dataclasses.replace(BASE, name=name, **self._change())

    def _change(self) -> dict[str, Any]:
        if self.dimension == "tables":
            return {"table_rows": (_ROWS // self.value,) * self.value}
        if self.dimension == "rows":
            return {"table_rows": (self.value // _TABLES,) * _TABLES}
        return {self.dimension: self.value}

    def job(self, base_steps: int) -> Job:
        """As long as that of the base, so with fewer steps where each has more values to move."""
        work = _values(self.workload) / _values(BASE)
        return Job(self.workload, _WARM_UP_STEPS, max(_LEAST_STEPS, round(base_steps / max(1.0, work))))


def _values(workload: Workload) -> int:
    """Values of the rows that a step looks up, over all trainers."""
    return workload.global_batch * len(workload.table_rows) * workload.hotness * workload.dim


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure every point once; the exit code is 1 where one failed."""
    folder = report.new_folder(options.output, "bench-scaling")
    came_from = origin([OWN_PYTHON])
    points = [Point(dimension, value) for dimension in options.dimensions for value in VALUES[dimension]]
    tasks = [Task(OURS_PIPELINED, p.job(options.steps), p.workload.config()) for p in points]
    measurements, failures = split(measured(tasks, console))
    by_name = {m.workload: m for m in measurements}
    series = {
        d: {
            p.value: by_name[p.workload.name]
            for p in points
            if p.dimension == d and p.workload.name in by_name
        }
        for d in options.dimensions
    }
    tables = [_table(dimension, of) for dimension, of in series.items()]
    note = " ".join((__doc__ or "").partition("\n\n")[2].split())
    notes = [note, *report.error_lines(failures, [])]
    report.write(
        folder,
        "Cost of a sample as one thing grows",
        came_from,
        report.raw_results(measurements, failures, [], []),
        notes,
        tables,
    )
    draw_scaling(series, folder / "results.png")
    report.show(console, notes, tables, folder)
    return 1 if failures else 0


def _table(dimension: str, series: Mapping[int, Measurement]) -> TextTable:
    header = (
        dimension,
        "samples/s",
        "CPU-s per million",
        "of trainers",
        "of workers",
        "MiB of a trainer",
        "MiB of a worker",
    )
    rows: list[Sequence[str]] = []
    for value, m in series.items():
        costs = [
            m.cpu_seconds_per_million,
            *(m.of_a_million(m.cpu_seconds[r]) for r in ("trainer", "worker")),
        ]
        held = [mib(m.memory_bytes[role]) for role in ("trainer", "worker")]
        rows.append((f"{value:,}", f"{m.samples_per_second:,.0f}", *(f"{c:.1f}" for c in costs), *held))
    return TextTable(f"As {dimension} grow" + ("s" if dimension in ("dim", "hotness") else ""), header, rows)
