"""``scripts/bench``: all systems on the same workloads, round by round."""

import argparse
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmark import report
from benchmark.durations import QUICK_STEPS, QUICK_WARM_UP_STEPS, ROUNDS, TIMED_STEPS, WARM_UP_STEPS
from benchmark.job import Job
from benchmark.machine import origin
from benchmark.results import Failure, Measurement, disagreements, split, summarise
from benchmark.rounds import Task, measured
from benchmark.systems import BENCH_PYTHON, ROOT, SYSTEMS, System
from benchmark.tables import TextTable
from benchmark.workloads import WORKLOADS
from hybrid.errors import HybridError

BASELINES = {
    "torchrec-pipelined": "x TorchRec pipelined",
    "tutorial": "x tutorial",
    "one-process": "x one process",
}
_REFERENCE = "one-process"  # the simplest system
_TITLES = {name: system.title for name, system in SYSTEMS.items()}


@dataclass
class _Comparison:
    """All measurements so far."""

    systems: Sequence[System]
    workloads: Sequence[str]
    origin: dict[str, Any]
    note: str
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def write(self, folder: Path) -> tuple[list[str], list[TextTable]]:
        """Write the report of all measurements; return the lines of errors, and the tables."""
        synchronous = [s.name for s in self.systems if s.is_synchronous]
        summaries = summarise(self.measurements, BASELINES)
        found = disagreements(self.measurements, synchronous, _REFERENCE)
        errors = report.error_lines(self.failures, found)
        baselines = {n: header for n, header in BASELINES.items() if n in {s.name for s in self.systems}}
        tables = []
        for workload in self.workloads:
            tables.append(report.speed_table(workload, summaries, self.failures, _TITLES, baselines))
            tables.append(report.loss_table(workload, summaries, found, _TITLES, synchronous))
        raw = report.raw_results(self.measurements, self.failures, summaries, found)
        report.write(folder, "Systems compared", self.origin, raw, [self.note, *errors], tables)
        return errors, tables


def run(options: argparse.Namespace, console: Console) -> int:
    """Compare; return 1 if a system failed or a loss is wrong."""
    systems = [SYSTEMS[name] for name in options.systems]
    folder = report.new_folder(options.output, "bench")
    if any(s.interpreter == BENCH_PYTHON for s in systems):
        make_environment()
    usual = QUICK_STEPS if options.quick else TIMED_STEPS
    warm_up = QUICK_WARM_UP_STEPS if options.quick else WARM_UP_STEPS
    steps = {name: options.steps or usual[name] for name in options.workloads}
    jobs = [
        Job(WORKLOADS[name].by(products), warm_up, count)
        for name, count in steps.items()
        for products in options.products
    ]
    num_rounds = options.rounds or (1 if options.quick else ROUNDS)
    note = _note(options.quick, num_rounds, steps)
    came_from = origin(s.interpreter for s in systems)
    state = _Comparison(systems, [job.workload.name for job in jobs], came_from, note)
    errors: list[str] = []
    tables: list[TextTable] = []
    for number in range(1, num_rounds + 1):
        tasks = [
            Task(system, job, job.workload.config(), number)
            for job in jobs
            for system in systems
            if (job.workload.name, system.name) not in {(f.workload, f.system) for f in state.failures}
        ]
        measurements, failures = split(measured(tasks, console))
        state.measurements += measurements
        state.failures += failures
        errors, tables = state.write(folder)  # keeps finished rounds if the bench is interrupted
    report.show(console, [note, *errors], tables, folder)
    return 1 if errors else 0


def _note(is_quick: bool, num_rounds: int, steps: dict[str, int]) -> str:
    timed = ", ".join(f"{count} of {name}" for name, count in steps.items())
    if is_quick:
        return (
            f"A quick look: {num_rounds} SHORT round(s) (timed steps: {timed}). The order of systems may be "
            "chance; take the full bench for figures to quote."
        )
    ratios = "; ratios are medians of those within each round" if num_rounds > 1 else ""
    return f"{num_rounds} round(s) through all systems; timed steps: {timed}{ratios}."


def make_environment() -> None:
    """Create or update the environment of FBGEMM and TorchRec."""
    script = ROOT / "scripts/benchmark/environment"
    try:
        subprocess.run([str(script)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise HybridError(f"the environment of FBGEMM and TorchRec cannot be made: {error}") from error
