"""``scripts/bench scaling``: the cost of a sample as one thing grows at a time, all others at a base shape.

The base shape: 2 trainers with 512 samples each, 2 workers, 16 tables of 20,000 rows and width 16, one id a
feature, the dense net of W2, updates pipelined. Each trainer keeps its 512 samples where trainers grow, and
all rows together stay as many where tables grow. "pooled" is the width of rows of which a sample has 16 a
feature, "adagrad" of those that Adagrad updates. "hidden" is the width of both upper layers of a DLRM with
2,048 samples a trainer; "peers" are trainers of a large net with 64 samples each; "sync" is
workers in synchronous steps, "gloo" trainers that share no memory. "together" is as many trainers as workers,
which aggregate requests per host from 4 on. Other points change several things at
once; what they cost is foretold by what the rest has cost.
"""

import argparse
import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmark import report
from benchmark.fitting import Sample, fit, prediction_table
from benchmark.job import Job
from benchmark.machine import origin
from benchmark.planned import planned_tables
from benchmark.plots import draw_scaling
from benchmark.results import Measurement, split
from benchmark.rounds import Task, measured
from benchmark.systems import OURS_PIPELINED, OURS_SYNC, OWN_PYTHON, System
from benchmark.tables import TextTable, mib
from benchmark.workloads import WORKLOADS, Workload
from hybrid.config import RunConfig
from workers.planning.costs import Costs
from workers.planning.demand import Demand, demand
from workers.planning.forecast import Hosts, forecast

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
    "samples": (64, 512, 2048, 8192),
    "tables": (8, 16, 128, 1000),
    "rows": (100_000, 1_000_000, 10_000_000, 50_000_000),
    "dim": (8, 16, 32, 64, 128),
    "hotness": (1, 4, 16, 64),
    "pooled": (32, 128),
    "adagrad": (16, 64),
    "hidden": (128, 512),
    "peers": (2, 8),
    "sync": (2, 8),
    "gloo": (2, 4, 8),
    "together": (2, 4, 8),
}
_SYSTEMS = {"sync": OURS_SYNC}
COSTS = "costs.toml"
_WARM_UP_STEPS = 20  # all batches once
_LEAST_STEPS = 20


@dataclass(frozen=True)
class Point:
    """A workload, and the system that trains it."""

    workload: Workload
    system: System = OURS_PIPELINED

    @property
    def config(self) -> RunConfig:
        """The run, with what its command line says."""
        config = self.workload.config()
        update = "sync" if self.system is OURS_SYNC else "pipelined"
        return config.replace(train=dataclasses.replace(config.train, update=update))

    @property
    def demand(self) -> Demand:
        """What a step of it asks for."""
        w = self.workload
        return demand(self.config, w.input_spec, w.ids_per_sample, hosts=1)


def point(dimension: str, value: int) -> Point:
    """The base shape with one thing grown."""
    workload = dataclasses.replace(BASE, **_change(dimension, value))
    if workload != BASE or dimension in (*_SYSTEMS, "together"):
        workload = dataclasses.replace(workload, name=f"{dimension} {value:,}")
    return Point(workload, _SYSTEMS.get(dimension, OURS_PIPELINED))


def _change(dimension: str, value: int) -> dict[str, Any]:
    match dimension:
        case "samples":
            return {"trainer_batch": value}
        case "tables":
            return {"table_rows": (_ROWS // value,) * value}
        case "rows":
            return {"table_rows": (value // _TABLES,) * _TABLES}
        case "pooled":
            return {"hotness": 16, "dim": value}
        case "adagrad":
            return {"optimizer": "adagrad", "dim": value}
        case "hidden":
            return {"trainer_batch": 2048, "dense": {"bottom_mlp": (64,), "top_mlp": (value, value)}}
        case "peers":
            return {
                "trainers": value,
                "trainer_batch": 64,
                "dense": {"bottom_mlp": (64,), "top_mlp": (512, 512)},
            }
        case "sync":
            return {"workers": value}
        case "gloo":
            return {"trainers": value, "dense": {**BASE.dense, "all_reduce": "group"}}
        case "together":
            return {"trainers": value, "workers": value}
        case _:
            return {dimension: value}


def _held(
    roles: tuple[int, int], samples: int, tables: int, rows: int, dim: int, hotness: int = 1, **more: Any
) -> Point:
    trainers, workers = roles
    shape = f"{tables} tables of {rows:,} x {dim}, {hotness} id{'s' if hotness > 1 else ''}"
    name = ", ".join((f"{trainers}+{workers}", f"{samples} samples", shape, *map(str, more.values())))
    more |= {"trainers": trainers, "workers": workers, "trainer_batch": samples, "hotness": hotness}
    return Point(dataclasses.replace(BASE, name=name, table_rows=(rows,) * tables, dim=dim, **more))


# What costs are not fitted to.
HELD_BACK = (
    _held((4, 4), 2048, 26, 20_000, 32),
    _held((8, 8), 64, 8, 20_000, 8),
    _held((1, 3), 256, 32, 10_000, 32, 10),
    _held((3, 1), 1024, 64, 100_000, 16),
    _held((1, 1), 4096, 26, 100_000, 64),
    _held((8, 2), 128, 100, 10_000, 16),
    _held((2, 8), 1024, 8, 200_000, 64, 20),
    _held((2, 2), 512, 16, 200_000, 32, optimizer="adagrad"),
    Point(dataclasses.replace(WORKLOADS["W1"], name="W1, 1+2", trainers=1)),
)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure every point once; the exit code is 1 where one failed.

    Costs are fitted where all dimensions are measured.
    """
    folder = report.new_folder(options.output, "bench-scaling")
    came_from = origin([OWN_PYTHON])
    grown = {d: {value: point(d, value) for value in VALUES[d]} for d in options.dimensions}
    fitted = list({p.workload.name: p for series in grown.values() for p in series.values()}.values())
    held_back = HELD_BACK if grown.keys() == VALUES.keys() else ()
    demands = {p.workload.name: p.demand for p in (*fitted, *held_back)}
    tasks = _tasks([*fitted, *held_back], demands, options.steps)
    measurements, failures = split(measured(tasks, console))
    if failures:  # once more: a machine busy with other things looks at a cluster when it has ended
        names = {failure.workload for failure in failures}
        again, failures = split(measured([t for t in tasks if t.job.workload.name in names], console))
        measurements += again
    by_name = {m.workload: m for m in measurements}
    series = {
        d: {value: by_name[p.workload.name] for value, p in of.items() if p.workload.name in by_name}
        for d, of in grown.items()
    }
    tables = [_table(dimension, of) for dimension, of in series.items()]
    if held_back:
        samples = {name: Sample(demands[name], m) for name, m in by_name.items()}
        held = [samples.pop(p.workload.name) for p in held_back if p.workload.name in samples]
        machine = came_from["machine"]
        line = f"{machine['cpu']}, {machine['cores']} cores, {came_from['date'][:10]}"
        fit(list(samples.values()), line, machine["cores"]).write(folder / COSTS)
        costs = Costs.read(folder / COSTS)  # as rounded there
        tables += [prediction_table(held, costs, machine["cores"]), *planned_tables(costs)]
    notes = [" ".join((__doc__ or "").partition("\n\n")[2].split()), *report.error_lines(failures, [])]
    raw = report.raw_results(measurements, failures, [], [])
    report.write(folder, "Cost of a sample as one thing grows", came_from, raw, notes, tables)
    draw_scaling(series, folder / "results.png")
    report.show(console, notes, tables, folder)
    return 1 if failures else 0


def _tasks(points: Sequence[Point], demands: Mapping[str, Demand], base_steps: int) -> list[Task]:
    """All points, each about as long as the base, in an order in which no kind of them comes together.

    The machine changes from minute to minute, and so would what is compared.
    """
    costs, hosts = Costs.read(), Hosts(1, 1, float("inf"), float("inf"))
    seconds = {name: forecast(asked, costs, hosts).step_seconds for name, asked in demands.items()}
    base = forecast(Point(BASE).demand, costs, hosts).step_seconds
    tasks = []
    for p in points:
        steps = max(_LEAST_STEPS, round(base_steps * min(1.0, base / seconds[p.workload.name])))
        tasks.append(Task(p.system, Job(p.workload, _WARM_UP_STEPS, steps), p.config))
    random.Random(0).shuffle(tasks)
    return tasks


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
