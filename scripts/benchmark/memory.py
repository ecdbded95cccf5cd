"""``scripts/bench memory``: what a row takes on a worker, by optimizer.

One worker holds one table, once small and once large. Memory of an optimizer's state counts once it has been
written to, so the job goes through enough ids that every page of it has been; what the worker's memory (USS)
grows by between the two, over the rows between them, is what a row takes.
"""

import argparse
from collections.abc import Mapping

from rich.console import Console

from benchmark import report
from benchmark.job import Job
from benchmark.machine import origin
from benchmark.results import Measurement, split
from benchmark.rounds import Task, measured
from benchmark.systems import OURS_SYNC, OWN_PYTHON
from benchmark.tables import TextTable, mib
from benchmark.workloads import NUM_BATCHES, Workload
from hybrid.config.table_sections import TABLE_OPTIMIZERS
from hybrid.embedding.placement import bytes_per_row
from hybrid.errors import ConfigError

SMALL_ROWS = 100_000
DIM = 64
_HOTNESS, _BATCH = 32, 4096  # 2.6 million ids in all batches, of which every page of the large table has some


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure all optimizers; the exit code is 1 where a run failed."""
    if options.rows <= SMALL_ROWS:
        raise ConfigError("--rows", f"must be above {SMALL_ROWS}, the rows of the small table", options.rows)
    folder = report.new_folder(options.output, "bench-memory")
    came_from = origin([OWN_PYTHON])
    workloads = {
        (name, rows): _workload(name, rows)
        for name in TABLE_OPTIMIZERS.names
        for rows in (SMALL_ROWS, options.rows)
    }
    tasks = [
        Task(OURS_SYNC, Job(w, NUM_BATCHES // 2, NUM_BATCHES // 2), w.config()) for w in workloads.values()
    ]
    measurements, failures = split(measured(tasks, console))
    table = _table(workloads, {m.workload: m for m in measurements}, options.rows)
    note = (
        f"One table of width {DIM} on one worker, float32, {SMALL_ROWS:,} and {options.rows:,} rows; "
        "memory is what a process shares with no other (USS). Trainers hold no rows."
    )
    notes = [note, *report.error_lines(failures, [])]
    raw = report.raw_results(measurements, failures, [], [])
    report.write(folder, "Memory of a row", came_from, raw, notes, [table])
    report.show(console, notes, [table], folder)
    return 1 if failures else 0


def _workload(optimizer: str, rows: int) -> Workload:
    return Workload(
        f"{optimizer}, {rows:,} rows",
        (rows,),
        DIM,
        _HOTNESS,
        _BATCH,
        trainers=1,
        workers=1,
        dense={"net": "benchmark.workloads:concatenation"},
        optimizer=optimizer,
    )


def _table(
    workloads: Mapping[tuple[str, int], Workload], measurements: Mapping[str, Measurement], rows: int
) -> TextTable:
    header = (
        "optimizer",
        "bytes a row",
        "by arithmetic",
        "ratio",
        "worker, small (MiB)",
        "worker, large (MiB)",
        "trainer, small (MiB)",
        "trainer, large (MiB)",
    )
    table = TextTable("Memory of a row", header)
    for name in TABLE_OPTIMIZERS.names:
        small_workload, large_workload = workloads[name, SMALL_ROWS], workloads[name, rows]
        if small_workload.name not in measurements or large_workload.name not in measurements:
            continue
        small = measurements[small_workload.name].memory_bytes
        large = measurements[large_workload.name].memory_bytes
        measured_bytes = (large["worker"] - small["worker"]) / (rows - SMALL_ROWS)
        least = bytes_per_row(large_workload.tables()[0])
        held = [mib(memory[role]) for role in ("worker", "trainer") for memory in (small, large)]
        ratio = f"{measured_bytes / least:.3f}"
        table.rows.append((name, f"{measured_bytes:.1f}", f"{least}", ratio, *held))
    return table
