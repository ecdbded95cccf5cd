"""``scripts/bench prepare``: the cost of preparing rows like those of Criteo's display ads.

Systems take turns on the same file, which is in the page cache. Each is a separate process with the same
cores. The measurement includes all processes that it starts, and imports.
"""

import argparse
import dataclasses
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil
from rich.console import Console

from benchmark import report
from benchmark.click_rows import write_click_rows
from benchmark.machine import origin
from benchmark.processes import ERRORS, started
from benchmark.running import MeasurementError
from benchmark.systems import OWN_PYTHON
from benchmark.tables import TextTable, mib, times
from hybrid.errors import ConfigError
from workers.run_folder.run_access import scratch_logs

PYARROW = "pyarrow"
# The module that prepares a file, and its arguments after the file.
_SYSTEMS = {
    "ours, with vocabularies": ("prepare_ours", "build"),
    "ours, hashed": ("prepare_ours", "hash"),
    PYARROW: ("prepare_pyarrow",),
}
_LARGE = (45_000_000, 4_400_000_000)  # rows of Criteo's Kaggle data set, and of its terabyte
_TIMEOUT_SECONDS, _TIMEOUT_SECONDS_A_ROW = 600.0, 2e-4
_SECONDS_BETWEEN_LOOKS = 0.1
_LOOKS_AT_MEMORY = 3  # one of so many: it takes the system milliseconds a process


@dataclass(frozen=True)
class Cost:
    """The cost of some rows for a system.

    Attributes:
        number: number of the round.
        seconds: duration of the command.
        cpu_seconds: of all processes, user and system.
        memory_bytes: maximum of all processes; shared pages count once.
        written_bytes: to files and pipes.
    """

    system: str
    rows: int
    number: int
    seconds: float
    cpu_seconds: float
    memory_bytes: int
    written_bytes: int


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure every system on every number of rows."""
    cores = sorted(os.sched_getaffinity(0))
    if options.cores > len(cores):
        raise ConfigError("--cores", f"must be at most the {len(cores)} there are", options.cores)
    cores = cores[: options.cores or None]
    folder = report.new_folder(options.output, "bench-prepare")
    came_from = origin([OWN_PYTHON])
    costs = []
    with scratch_logs("bench-") as scratch:
        for rows in options.rows:
            write_click_rows(file := scratch / "rows.tsv", rows)
            for number in range(1, options.rounds + 1):
                for system in _SYSTEMS:
                    costs.append(cost := _measured(system, file, rows, number, cores, scratch))
                    console.print(_line(cost), markup=False, highlight=False)
    notes = [_note(len(cores), options.rounds)]
    tables = [cost_table(costs), account_table(costs, len(cores))]
    raw = {"costs": [dataclasses.asdict(each) for each in costs]}
    report.write(folder, "Preparing data", came_from, raw, notes, tables)
    report.show(console, notes, tables, folder)
    return 0


def _note(num_cores: int, rounds: int) -> str:
    return (
        "Rows of 259 bytes: a label, 13 numbers, 26 columns of values. Ours writes a prepared data set, and "
        "does not import torch, as the master of a training does. pyarrow reads the same file in blocks of "
        "16 MiB, makes codes into one dictionary of each of the 26 columns, and puts 0 for missing numbers, "
        "in memory. It does not check rows, and writes nothing. "
        f"{num_cores} core(s), {rounds} round(s) in turn, medians; CPU of all processes, start and imports "
        "included."
    )


def _measured(system: str, file: Path, rows: int, number: int, cores: Sequence[int], scratch: Path) -> Cost:
    """Prepare ``file`` with a system.

    Raises:
        MeasurementError: the job failed or took too long.
    """
    module, *arguments = _SYSTEMS[system]
    result = scratch / "prepared"
    python = [OWN_PYTHON, "-P", "-m", f"benchmark.{module}", str(file), *arguments, str(result)]
    limited = ["taskset", "--cpu-list", ",".join(map(str, cores)), *python]
    before, begin = _cpu_of_ended(), time.monotonic()
    deadline = begin + _TIMEOUT_SECONDS + rows * _TIMEOUT_SECONDS_A_ROW
    memory_bytes = written_bytes = 0
    with started(limited, scratch, {}) as process:
        for look in count():
            memory, written = _held_and_written(process.pid, look % _LOOKS_AT_MEMORY == 0)
            memory_bytes, written_bytes = max(memory_bytes, memory), max(written_bytes, written)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_SECONDS_BETWEEN_LOOKS)
                break
            if time.monotonic() > deadline:
                raise MeasurementError(f"{rows:,} rows by {system} are not done after {deadline - begin:g} s")
    seconds = time.monotonic() - begin
    if process.returncode:
        raise MeasurementError(f"{system} has failed: {(scratch / ERRORS).read_text()}")
    shutil.rmtree(result, ignore_errors=True)
    cpu_seconds = _cpu_of_ended() - before
    return Cost(system, rows, number, seconds, cpu_seconds, memory_bytes, written_bytes)


def _cpu_of_ended() -> float:
    """Return the CPU-seconds of all descendants that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _held_and_written(root: int, with_memory: bool) -> tuple[int, int]:
    """The memory that a process and all below it have, if wanted, and the bytes that these have written.

    The system adds what a process has written to its parent's account when that hears of its end.
    """
    memory_bytes = written_bytes = 0
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(root)
        for each in (top, *top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                written_bytes += each.io_counters().write_chars
                memory_bytes += each.memory_full_info().pss if with_memory else 0
    return memory_bytes, written_bytes


def _line(cost: Cost) -> str:
    each = cost.cpu_seconds / cost.rows * 1e6
    what = f"round {cost.number}: {cost.rows:,} rows, {cost.system}"
    return f"{what}: {cost.seconds:.1f} s, {each:.2f} us of CPU a row"


def cost_table(costs: Sequence[Cost]) -> TextTable:
    """Return the medians over the rounds, with the ratio to pyarrow in the same round."""
    header = ("system", "seconds", "CPU-seconds", "us of CPU a row", "MiB", "MiB written", "of pyarrow's CPU")
    table = TextTable("Preparing data", header)
    for rows, system in dict.fromkeys((each.rows, each.system) for each in costs):
        of_system, of_pyarrow = (_of(costs, rows, name) for name in (system, PYARROW))
        cpu = statistics.median(each.cpu_seconds for each in of_system)
        ratios = [
            each.cpu_seconds / base.cpu_seconds for each, base in zip(of_system, of_pyarrow, strict=True)
        ]
        cells = (
            f"{rows:,} rows, {system}",
            f"{statistics.median(each.seconds for each in of_system):.1f}",
            f"{cpu:.1f}",
            f"{cpu / rows * 1e6:.2f}",
            mib(statistics.median(each.memory_bytes for each in of_system)),
            mib(statistics.median(each.written_bytes for each in of_system)),
            times(statistics.median(ratios)),
        )
        table.rows.append(cells)
    return table


def account_table(costs: Sequence[Cost], num_cores: int) -> TextTable:
    """Extrapolate the largest measurement to the number of rows of Criteo's data sets."""
    most = max(each.rows for each in costs)
    header = ("system", "CPU-hours", f"hours on {num_cores} core(s)", "GiB written")
    table = TextTable(f"By {most:,} rows, more would take", header)
    for rows in _LARGE:
        for system in dict.fromkeys(each.system for each in costs):
            of_system = _of(costs, most, system)
            taken = (
                statistics.median(each.cpu_seconds for each in of_system) / 3600,
                statistics.median(each.seconds for each in of_system) / 3600,
                statistics.median(each.written_bytes for each in of_system) / 2**30,
            )
            table.rows.append((f"{rows:,} rows, {system}", *(f"{each * rows / most:,.2f}" for each in taken)))
    return table


def _of(costs: Sequence[Cost], rows: int, system: str) -> list[Cost]:
    return [each for each in costs if (each.rows, each.system) == (rows, system)]
