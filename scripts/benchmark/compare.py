"""``scripts/bench compare``: all systems on the same workloads, round by round."""

import argparse
import dataclasses
import math
import statistics
import subprocess
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmark import report
from benchmark.running import Measurement, MeasurementError, measure
from benchmark.systems import BENCH_PYTHON, REFERENCE, ROOT, SYSTEMS
from hybrid.errors import HybridError

ROUNDS = 3
# Timed steps by workload: a few seconds for the fastest system on two cores.
TIMED_STEPS = {"W1": 60, "W2": 160, "W3": 400, "W4": 200, "W5": 80, "W6": 400, "W7": 40}
_WARM_UP_STEPS = 10
# For --quick: all systems and workloads within six minutes.
_QUICK_STEPS = {"W1": 8, "W2": 12, "W3": 40, "W4": 40, "W5": 12, "W6": 80, "W7": 4}
_QUICK_WARM_UP_STEPS = 4
_BASELINES = {"torchrec": "x TorchRec", REFERENCE: "x one process"}
# Of the size of a loss: five digits. Rounding comes to 1e-6 after hundreds of steps; rows that move twice as
# far, to 2e-4 after ten of W2. Of W1 and W3 it is 1e-5 or less: in so few steps their losses hardly depend on
# the tables.
_LOSS_TOLERANCE = 1e-5
_LOSS_STEPS = (1, 2, 3, 10)  # and the last

Pair = tuple[str, str]  # a workload and a system


def run(options: argparse.Namespace, console: Console) -> int:
    """Compare; return 1 if a system failed or a loss is wrong."""
    interpreters = [SYSTEMS[name].python for name in options.systems]
    folder = report.new_folder(options.output, "bench")
    if BENCH_PYTHON in interpreters:
        _make_environment()
    warm_up, usual = (_QUICK_WARM_UP_STEPS, _QUICK_STEPS) if options.quick else (_WARM_UP_STEPS, TIMED_STEPS)
    steps = {name: options.steps or usual[name] for name in options.workloads}
    num_rounds = options.rounds or (1 if options.quick else ROUNDS)
    origin = report.origin(interpreters)
    timed = ", ".join(f"{count} of {name}" for name, count in steps.items())
    machine = ", ".join(f"{key} {value}" for key, value in origin.items())
    notes = [f"{num_rounds} round(s), medians; timed steps: {timed}.", machine]
    measurements: list[Measurement] = []
    failures: dict[Pair, str] = {}
    for number in range(1, num_rounds + 1):
        for pair in [(workload, system) for workload in steps for system in options.systems]:
            if pair not in failures:
                try:
                    measurements.append(measure(*pair, warm_up, steps[pair[0]], number))
                except MeasurementError as error:
                    failures[pair] = str(error)
                line = failures.get(pair) or measurements[-1]
                console.print(f"round {number}: {', '.join(pair)}: {line}", markup=False, highlight=False)
        # After each round, so that finished rounds are kept if the benchmark is interrupted.
        wrong_losses = find_wrong_losses(measurements)
        errors = [f"ERROR: {', '.join(pair)}: {text}" for pair, text in (failures | wrong_losses).items()]
        tables = [_speed_table(name, measurements, failures, wrong_losses) for name in steps]
        if on_gpus := [each for each in measurements if each.gpu]:
            tables.append(_gpu_table(on_gpus))
        values = {**origin, "errors": errors, "measurements": [dataclasses.asdict(m) for m in measurements]}
        report.write(folder, values, [*notes, *errors], tables)
    report.show(console, folder, [*notes, *errors], tables)
    return 1 if errors else 0


def _make_environment() -> None:
    """Create or update the environment of FBGEMM and TorchRec."""
    if subprocess.run([str(ROOT / "scripts/benchmark/environment")]).returncode:
        raise HybridError("the environment of FBGEMM and TorchRec cannot be created; see above")


def find_wrong_losses(measurements: Sequence[Measurement]) -> dict[Pair, str]:
    """Return a message for each synchronous system with a wrong loss on a workload.

    All synchronous systems do the same arithmetic up to rounding. In every round, the losses of steps 1, 2,
    3, 10 and the last must agree with the losses of the reference in its first round. Where the reference was
    not measured, the first synchronous system takes its place. A loss that is not finite is wrong.
    """
    synchronous = [m for m in measurements if SYSTEMS[m.system].is_synchronous]
    references: dict[str, Measurement] = {}
    wrong: dict[Pair, str] = {}
    for m in sorted(synchronous, key=lambda each: each.system != REFERENCE):
        reference = references.setdefault(m.workload, m)
        for step in (*(each for each in _LOSS_STEPS if each < len(m.losses)), len(m.losses)):
            loss, right = m.losses[step - 1], reference.losses[step - 1]
            if not (math.isfinite(loss) and math.isclose(loss, right, rel_tol=_LOSS_TOLERANCE)):
                text = f"the loss of step {step} in round {m.number} is {loss:.6f}; {right:.6f} is right"
                wrong.setdefault((m.workload, m.system), text)
    return wrong


def _speed_table(
    workload: str,
    measurements: Sequence[Measurement],
    failures: dict[Pair, str],
    wrong_losses: dict[Pair, str],
) -> Table:
    """Return samples per second, CPU time and agreement of losses of all systems on one workload.

    A ratio is the median of the ratios within each round.
    """
    header = ("system", "samples/s", "of each round", *_BASELINES.values(), "CPU-s per million", "losses")
    table = report.new_table(workload, *header)
    by_system: dict[str, dict[int, Measurement]] = {}
    for m in measurements:
        if m.workload == workload:
            by_system.setdefault(m.system, {})[m.number] = m
    for name, rounds in by_system.items():
        ratios = [_ratio(rounds, by_system.get(baseline, {})) for baseline in _BASELINES]
        verdict = "wrong" if (workload, name) in wrong_losses else "agree"
        table.add_row(
            SYSTEMS[name].title,
            f"{statistics.median(m.samples_per_second for m in rounds.values()):,.0f}",
            " ".join(f"{m.samples_per_second:,.0f}" for m in rounds.values()),
            *ratios,
            f"{statistics.median(m.cpu_seconds_per_million for m in rounds.values()):.1f}",
            verdict if SYSTEMS[name].is_synchronous else "not synchronous",
        )
    for name in (system for of, system in failures if of == workload):
        table.add_row(SYSTEMS[name].title, "FAILED")
    return table


def _gpu_table(measurements: Sequence[Measurement]) -> Table:
    """Return what the GPU of trainer 0 does in a step."""
    header = ("workload, system", "kernels", "to the GPU", "from the GPU", "pageable copies")
    table = report.new_table("a step on the GPU of trainer 0", *header)
    for m in measurements:
        step = m.gpu[0]
        table.add_row(
            f"{m.workload}, {SYSTEMS[m.system].title}",
            f"{step['kernels']:.0f}, {step['kernel_ms']:.2f} ms",
            f"{step['to_gpu_mb']:.2f} MB, {step['to_gpu_ms']:.2f} ms",
            f"{step['from_gpu_mb']:.2f} MB, {step['from_gpu_ms']:.2f} ms",
            f"{step['pageable']:.1f}",
        )
    return table


def _ratio(rounds: dict[int, Measurement], baseline: dict[int, Measurement]) -> str:
    ratios = [
        m.samples_per_second / baseline[number].samples_per_second
        for number, m in rounds.items()
        if number in baseline
    ]
    return f"{statistics.median(ratios):.2f}" if ratios else report.NO_VALUE
