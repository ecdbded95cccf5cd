"""``scripts/bench prepare``: the cost of preparing rows like those of Criteo's display ads.

The variants are vocabularies, hashed values, and for comparison pyarrow, which reads the file into
dictionary-encoded columns in memory, with 0 for missing numbers. pyarrow checks and writes nothing. Each
measurement is in a separate process, whose start and imports do not count. The file is in the page cache.
"""

import argparse
import dataclasses
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
from rich.console import Console
from rich.table import Table

from benchmark import report
from benchmark.click_rows import COLUMNS, DENSE, SPARSE, write_click_rows
from benchmark.systems import OWN_PYTHON
from hybrid.config.loading import load_config
from hybrid.data.prepare.preparation import prepare
from workers.run_folder.run_access import scratch_logs

_PYARROW = "pyarrow"
_VARIANTS = ("build", "hash", _PYARROW)  # the first two are values of data.vocabulary
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Cost:
    """The cost of preparing some rows.

    Attributes:
        cpu_seconds: user and system time of all threads.
        memory_bytes: peak resident memory, minus the resident memory before the preparation.
    """

    variant: str
    rows: int
    seconds: float
    cpu_seconds: float
    memory_bytes: int


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure every variant on every number of rows."""
    folder, origin = report.new_folder(options.output, "bench-prepare"), report.origin([OWN_PYTHON])
    costs = []
    spawn = multiprocessing.get_context("spawn")
    with scratch_logs("bench-") as scratch, ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as processes:
        for rows in options.rows:
            write_click_rows(scratch / "rows.tsv", rows)
            for variant in _VARIANTS:
                costs.append(processes.submit(_measure, variant, rows, scratch / "rows.tsv").result())
    table = _cost_table(costs)
    report.write(folder, {**origin, "costs": [dataclasses.asdict(each) for each in costs]}, [], [table])
    report.show(console, folder, [], [table])
    return 0


def _measure(variant: str, rows: int, file: Path) -> Cost:
    """Return the cost of preparing a file in this process."""
    memory_bytes, cpu_seconds, start = (
        psutil.Process().memory_info().rss,
        time.process_time(),
        time.monotonic(),
    )
    if variant == _PYARROW:
        _read_by_pyarrow(file)
    else:
        _prepare(file, variant)
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_seconds
    return Cost(variant, rows, seconds, cpu_seconds, _peak_bytes() - memory_bytes)


def _peak_bytes() -> int:
    """Return the highest resident memory of this process so far."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10


def _prepare(file: Path, vocabulary: str) -> None:
    scaling = "data.numeric_scaling=standardize(log = true)"
    settings = ["data.format=criteo", "data.split=none", scaling, f"data.vocabulary={vocabulary}"]
    folder = file.with_name("prepared")
    prepare(load_config(None, [f"data.path={file}", *settings]), folder)
    shutil.rmtree(folder)


def _read_by_pyarrow(file: Path) -> None:
    pa.set_cpu_count(len(os.sched_getaffinity(0)))
    types = dict.fromkeys(COLUMNS, pa.int8())
    types |= dict.fromkeys(DENSE, pa.float64())
    types |= dict.fromkeys(SPARSE, pa.dictionary(pa.int32(), pa.string()))
    table = pacsv.read_csv(
        file,
        pacsv.ReadOptions(column_names=COLUMNS, block_size=_BLOCK_BYTES),
        pacsv.ParseOptions(delimiter="\t", quote_char=False),
        pacsv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    table = table.unify_dictionaries()
    for name in DENSE:
        table = table.set_column(COLUMNS.index(name), name, pc.fill_null(table[name], 0.0))


def _cost_table(costs: Sequence[Cost]) -> Table:
    header = ("variant", "rows", "seconds", "CPU-us per row", "x pyarrow", "MiB")
    table = report.new_table("Preparing data", *header)
    baselines = {each.rows: each.cpu_seconds for each in costs if each.variant == _PYARROW}
    for each in costs:
        table.add_row(
            each.variant,
            f"{each.rows:,}",
            f"{each.seconds:.1f}",
            f"{each.cpu_seconds / each.rows * 1e6:.2f}",
            f"{each.cpu_seconds / baselines[each.rows]:.2f}",
            f"{each.memory_bytes / 2**20:,.0f}",
        )
    return table
