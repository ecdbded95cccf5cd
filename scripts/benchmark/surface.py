"""``scripts/bench surface``: points of a grid of shapes, each beside one process and TorchRec.

Speed is samples/s of this project, ``lookahead``, over those of TorchRec, pipelined. Cost is CPU-seconds of
this project over those of the best single process. Any two values of two dimensions occur together in one
point; with ``--quick``, each value occurs in one. Tables have 10,000 rows and sum pooling, the dense net is
that of W2. If a step would have more than 2^27 values or 2^21 ids, the point has fewer samples.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from support.covering import covering_rows

from benchmark import report
from benchmark.compare import make_environment
from benchmark.job import Job
from benchmark.machine import origin
from benchmark.results import LOSS_STEPS, Failure, Measurement, disagreements, split
from benchmark.rounds import Task, measured
from benchmark.systems import BENCH_PYTHON, OWN_PYTHON, SYSTEMS
from benchmark.tables import NONE, TextTable, times
from benchmark.workloads import WORKLOADS, Workload

GRID: Mapping[str, Sequence[Any]] = {
    "samples": (64, 256, 512, 1024, 4096),
    "roles": ((1, 1), (1, 3), (2, 2), (3, 1), (4, 4), (8, 8)),
    "features": (8, 32, 128),
    "ids": (1, 5, 20),
    "varies": (False, True),
    "dim": (8, 32, 128),
    "optimizer": ("sgd", "adagrad", "rowwise_adagrad", "adam"),
}
_MULTI_HOT = {"samples": 512, "features": 8, "ids": 20, "varies": True, "dim": 8, "optimizer": "sgd"}
KNOWN = ({**_MULTI_HOT, "roles": (3, 1)}, {**_MULTI_HOT, "roles": (1, 3)})  # were slow once
OURS, TORCHREC = "ours-lookahead", "torchrec-pipelined"
SINGLE = ("one-process", "one-process-fbgemm")
COMPARED = (OURS, *SINGLE, TORCHREC)

_MOST_VALUES, _MOST_IDS = 1 << 27, 1 << 21  # of a step
_WARM_UP_STEPS, _LEAST_STEPS, _MOST_STEPS = 6, 10, 500
_VALUES_PER_SECOND, _SECONDS_PER_ROLE = 2e8, 1e-3  # of a step on two cores, roughly


@dataclass(frozen=True)
class Point:
    """The measurements at one point, by system; a ratio is None if one of them is missing."""

    workload: Workload
    measurements: Mapping[str, Measurement]

    @property
    def speed(self) -> float | None:
        """Samples/s over those of TorchRec."""
        ours, theirs = self.measurements.get(OURS), self.measurements.get(TORCHREC)
        return ours.samples_per_second / theirs.samples_per_second if ours and theirs else None

    @property
    def cost(self) -> float | None:
        """CPU-seconds over those of the best single process."""
        cpu = {system: m.cpu_seconds_per_million for system, m in self.measurements.items()}
        best = min((cpu[system] for system in SINGLE if system in cpu), default=None)
        return cpu[OURS] / best if best and OURS in cpu else None

    @property
    def has_large_steps(self) -> bool:
        """Whether messages and roles are few, so that the cost should be low."""
        return self.workload.trainer_batch >= 512 and max(self.workload.trainers, self.workload.workers) <= 2


def workload(
    samples: int, roles: tuple[int, int], features: int, ids: int, varies: bool, dim: int, optimizer: str
) -> Workload:
    """Return the workload of a point, which names the point."""
    largest = min(_MOST_VALUES // dim, _MOST_IDS) // (roles[0] * features * ids)
    samples = min(samples, 1 << (largest.bit_length() - 1))
    bags = f"0-{2 * ids}" if varies else str(ids)
    name = f"{samples} samples, {roles[0]}+{roles[1]}, {features} x {bags} ids, width {dim}, {optimizer}"
    rows, dense = (10_000,) * features, WORKLOADS["W2"].dense
    return Workload(name, rows, dim, ids, samples, *roles, dense, optimizer, varies)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure each point once; return 1 if a system failed or a loss is wrong."""
    folder = report.new_folder(options.output, "bench-surface")
    make_environment()
    came_from = origin([OWN_PYTHON, BENCH_PYTHON])
    longest = max(map(len, GRID.values()))
    once = [{name: values[i % len(values)] for name, values in GRID.items()} for i in range(longest)]
    shapes = once if options.quick else [*KNOWN, *covering_rows(GRID)]
    points: list[Point] = []
    failures: list[Failure] = []
    for each in {w.name: w for w in (workload(**shape) for shape in shapes)}.values():
        tasks = [
            Task(SYSTEMS[name], _job(each, options.seconds), each.config())
            for name in COMPARED
            if each.optimizer in SYSTEMS[name].table_optimizers
        ]
        measurements, failed = split(measured(tasks, console))
        points.append(Point(each, {m.system: m for m in measurements}))
        failures += failed
        errors, notes, table = _write(folder, came_from, points, failures)  # keeps points if interrupted
    report.show(console, notes, [table], folder)
    return 1 if errors else 0


def _job(of: Workload, seconds: float) -> Job:
    """Return as many steps as take about this time."""
    values = of.global_batch * len(of.table_rows) * of.hotness * of.dim
    step_seconds = values / _VALUES_PER_SECOND + _SECONDS_PER_ROLE * (of.trainers + of.workers)
    return Job(of, _WARM_UP_STEPS, min(_MOST_STEPS, max(_LEAST_STEPS, round(seconds / step_seconds))))


def _write(
    folder: Path, came_from: dict[str, Any], points: Sequence[Point], failures: Sequence[Failure]
) -> tuple[list[str], list[str], TextTable]:
    """Write the report of the points so far; return the lines of errors, all notes, and the table."""
    # SparseAdam of torch counts steps otherwise. After hundreds of steps on the same few samples, rounding
    # errors are large beside the loss.
    measurements = [m for point in points for m in point.measurements.values()]
    compared = [m for m in measurements if not m.workload.endswith("adam")]
    first_steps = [replace(m, losses=m.losses[: max(LOSS_STEPS)]) for m in compared]
    found = disagreements(first_steps, COMPARED, SINGLE[0])
    errors = report.error_lines(failures, found)
    speeds = {p.workload.name: p.speed for p in points}
    costs = {p.workload.name: p.cost for p in points if p.has_large_steps}
    what = "cost at most 1.25 (512 samples a trainer or more, 2+2 roles or fewer)"
    notes = [
        _count_good("speed at least 1", speeds, lambda speed: speed >= 1),
        _count_good(what, costs, lambda cost: cost <= 1.25),
        *errors,
    ]
    table = TextTable("Points by cost", ("point", "cost", "speed", "samples/s", "CPU-s per million"))
    for point in sorted(points, key=lambda p: -(p.cost or 0.0)):
        cells = [NONE, NONE]
        if ours := point.measurements.get(OURS):
            cells = [f"{ours.samples_per_second:,.0f}", f"{ours.cpu_seconds_per_million:.1f}"]
        table.rows.append([point.workload.name, times(point.cost), times(point.speed), *cells])
    raw = report.raw_results(measurements, failures, [], found)
    report.write(folder, "Grid of shapes", came_from, raw, notes, [table])
    return errors, notes, table


def _count_good(what: str, values: Mapping[str, float | None], is_good: Callable[[float], bool]) -> str:
    """Return how many of the points with a value are good, and the others."""
    known = {name: value for name, value in values.items() if value is not None}
    others = "; ".join(f"{name} ({value:.2f})" for name, value in known.items() if not is_good(value))
    good = sum(map(is_good, known.values()))
    return f"{what}: {good} of {len(known)} points; not: {others or 'none'}"
