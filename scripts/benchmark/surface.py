"""``scripts/bench surface``: shapes that nobody tuned for, each beside one process and TorchRec.

In one run: points of a grid in which every two values of two dimensions meet (``--quick``: every value
stands once), and shapes that were once found bad. A point's *cost* is the CPU-seconds of this project,
pipelined, for a million samples over those of the best single process; its *speed* is its samples a second
over TorchRec's, pipelined. Tables have 10,000 rows each and sum pooling, the dense net is that of W2. Where
a step would move more than 2^27 values or 2^21 ids over all trainers, these take fewer samples.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from benchmark import report
from benchmark.compare import make_environment
from benchmark.covering import covering_rows
from benchmark.job import Job
from benchmark.machine import origin
from benchmark.plots import draw_surface
from benchmark.results import LOSS_STEPS, Failure, Measurement, disagreements, split
from benchmark.rounds import Task, measured
from benchmark.systems import BENCH_PYTHON, OWN_PYTHON, SYSTEMS
from benchmark.tables import NONE, TextTable, times
from benchmark.workloads import Workload

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
KNOWN = ({**_MULTI_HOT, "roles": (3, 1)}, {**_MULTI_HOT, "roles": (1, 3)})
OURS, TORCHREC = "ours-pipelined", "torchrec-pipelined"
SINGLE = ("one-process", "one-process-fbgemm")
_SYNC = "ours-sync"  # shows that optimizers are set alike

_TABLE_ROWS = 10_000
_MOST_VALUES, _MOST_IDS = 1 << 27, 1 << 21  # of a step
_WARM_UP_STEPS = 6
_LEAST_STEPS, _MOST_STEPS = 10, 500
# What a step takes, roughly, on two cores: enough to choose how many make some seconds.
_VALUES_PER_SECOND, _SECONDS_PER_ROLE = 2e8, 1e-3


@dataclass(frozen=True)
class Point:
    """What was measured at one point of the grid.

    Attributes:
        measurements: by system.
    """

    workload: Workload
    measurements: Mapping[str, Measurement]

    @property
    def single_cpu(self) -> float | None:
        """CPU-seconds for a million samples of the best single process; None where none was measured."""
        return min(
            (m.cpu_seconds_per_million for s in SINGLE if (m := self.measurements.get(s))), default=None
        )

    @property
    def cost(self) -> float | None:
        """CPU-seconds over those of the best single process; None where either was not measured."""
        ours, single = self.measurements.get(OURS), self.single_cpu
        return ours.cpu_seconds_per_million / single if ours and single else None

    @property
    def speed(self) -> float | None:
        """Samples a second over TorchRec's."""
        ours, theirs = self.measurements.get(OURS), self.measurements.get(TORCHREC)
        return ours.samples_per_second / theirs.samples_per_second if ours and theirs else None


def workload(
    samples: int, roles: tuple[int, int], features: int, ids: int, varies: bool, dim: int, optimizer: str
) -> Workload:
    """The workload of a point, named by it."""
    trainers, workers = roles
    largest = min(_MOST_VALUES // dim, _MOST_IDS) // (trainers * features * ids)
    samples = min(samples, 1 << (largest.bit_length() - 1))
    bags = f"0-{2 * ids}" if varies else str(ids)
    return Workload(
        f"{samples} samples, {trainers}+{workers}, {features} x {bags} ids, width {dim}, {optimizer}",
        (_TABLE_ROWS,) * features,
        dim,
        ids,
        samples,
        trainers,
        workers,
        {"net": "benchmark.workloads:concatenation"},
        optimizer,
        varies,
    )


def job(of: Workload, seconds: float) -> Job:
    """As many steps as take about so long."""
    values = of.global_batch * len(of.table_rows) * of.hotness * of.dim
    step_seconds = values / _VALUES_PER_SECOND + _SECONDS_PER_ROLE * (of.trainers + of.workers)
    return Job(of, _WARM_UP_STEPS, min(_MOST_STEPS, max(_LEAST_STEPS, round(seconds / step_seconds))))


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure every point once; the exit code is 1 where a system failed, or a loss is wrong."""
    folder = report.new_folder(options.output, "bench-surface")
    make_environment()
    rows = [*KNOWN, *covering_rows(GRID, 1 if options.quick else 2)]
    workloads = list({w.name: w for w in (workload(**row) for row in rows)}.values())
    systems = [OURS, *SINGLE, TORCHREC, *(() if options.quick else (_SYNC,))]
    tasks = [
        Task(SYSTEMS[system], job(each, options.seconds), each.config())
        for each in workloads
        for system in systems
        if each.optimizer in SYSTEMS[system].table_optimizers
    ]
    came_from = origin([OWN_PYTHON, BENCH_PYTHON])
    measurements, failures = split(measured(tasks, console))
    points = _points(workloads, measurements)
    found = disagreements(comparable(points), [s for s in systems if SYSTEMS[s].is_synchronous], SINGLE[0])
    notes = [" ".join((__doc__ or "").partition("\n\n")[2].split()), *report.error_lines(failures, found)]
    table = _table(points, failures)
    raw = report.raw_results(measurements, failures, [], found)
    report.write(folder, "The surface", came_from, raw, notes, [table])
    draw_surface(
        [(p.workload.name, p.speed, p.cost) for p in points if p.speed and p.cost], folder / "results.png"
    )
    report.show(console, notes, [table], folder)
    console.print(_worst(points), markup=False, highlight=False)
    return 1 if failures or found else 0


def comparable(points: Iterable[Point]) -> list[Measurement]:
    """What losses are compared of: not of Adam, whose steps torch counts by table, and the first steps alone.

    Hundreds of steps on the same few samples end with losses of a thousandth, and what was rounded in the
    sixteenth of them may be a hundred times what it was in the tenth.
    """
    return [
        replace(each, losses=each.losses[: max(LOSS_STEPS)])
        for point in points
        if point.workload.optimizer != "adam"
        for each in point.measurements.values()
    ]


def _points(workloads: Iterable[Workload], measurements: Sequence[Measurement]) -> list[Point]:
    """The points, the dearest first; those without a cost last."""
    points = [
        Point(each, {m.system: m for m in measurements if m.workload == each.name}) for each in workloads
    ]
    return sorted(points, key=lambda p: -(p.cost or 0.0))


def _table(points: Sequence[Point], failures: Sequence[Failure]) -> TextTable:
    header = ("point", "cost", "speed", "samples/s", "CPU-s per million", "of the best process", "TorchRec")
    table = TextTable("Points, the dearest first", header)
    for point in points:
        ours, theirs = (point.measurements.get(system) for system in (OURS, TORCHREC))
        table.rows.append(
            (
                point.workload.name,
                times(point.cost),
                times(point.speed),
                f"{ours.samples_per_second:,.0f}" if ours else NONE,
                f"{ours.cpu_seconds_per_million:.1f}" if ours else NONE,
                f"{point.single_cpu:.1f}" if point.single_cpu else NONE,
                f"{theirs.samples_per_second:,.0f}" if theirs else NONE,
            )
        )
    return table


def _worst(points: Sequence[Point]) -> str:
    beside_torchrec = [p for p in points if p.speed is not None]
    beside_one = [p for p in points if p.cost is not None]
    if not beside_torchrec or not beside_one:
        return "no point was measured beside other systems"
    slowest = min(beside_torchrec, key=lambda p: p.speed or 0.0)
    return "\n".join(
        f"{what}: {p.workload.name}: cost {times(p.cost)}, speed {times(p.speed)}"
        for what, p in (("slowest", slowest), ("worst", beside_one[0]))
    )
