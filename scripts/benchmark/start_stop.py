"""``scripts/bench start``: duration of the start and the end of the default job."""

import argparse
import dataclasses
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmark import report
from benchmark.machine import origin
from benchmark.processes import ERRORS, started
from benchmark.running import MeasurementError
from benchmark.systems import OWN_PYTHON
from benchmark.tables import TextTable
from workers.run_folder.run_access import scratch_logs

STEPS = 20
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Launch:
    """Durations of one ``hybrid launch``, in seconds.

    Attributes:
        to_first_step: from the command to the end of the first step.
        first_to_last_step: the remaining steps.
        to_summary: from the last step to the summary: evaluation, checkpoint, curves.
        stop: from the summary to the end of the last process.
    """

    to_first_step: float
    first_to_last_step: float
    to_summary: float
    stop: float


def run(options: argparse.Namespace, console: Console) -> int:
    """Launch the default job in several rounds."""
    folder = report.new_folder(options.output, "bench-start")
    came_from = origin([OWN_PYTHON])
    launches: list[Launch] = []
    with scratch_logs("bench-") as scratch:
        for number in range(1, options.rounds + 1):
            launches.append(_launch(scratch, number))
            last = launches[-1]
            console.print(
                f"round {number}: {last.to_first_step:.2f} s to the first step, {last.stop:.2f} s to stop"
            )
    note = (
        f"`hybrid launch --set train.max_steps={STEPS}`, {options.rounds} round(s). The built-in data set is "
        "made in the first, and found prepared in the others."
    )
    raw = {"launches": [dataclasses.asdict(each) for each in launches]}
    table = _table(launches)
    report.write(folder, "Start and stop", came_from, raw, [note], [table])
    report.show(console, [note], [table], folder)
    return 0


def _launch(scratch: Path, number: int) -> Launch:
    """Run the job once.

    Raises:
        MeasurementError: the job failed or took too long.
    """
    run_folder = scratch / f"run-{number}"
    settings = [f"train.max_steps={STEPS}", f"run.folder={run_folder}"]
    arguments = [OWN_PYTHON, "-P", "-m", "workers", "launch", *(t for s in settings for t in ("--set", s))]
    begin = time.time()
    with started(arguments, scratch, {}) as process:
        try:
            process.communicate(timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"hybrid launch is not done after {_TIMEOUT_SECONDS:g} s") from None
        end = time.time()
    if process.returncode:
        raise MeasurementError(f"hybrid launch failed: {(scratch / ERRORS).read_text()}")
    result_file = run_folder / "result.json"
    records = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    last_step = max(record["time"] for record in records if record["kind"] == "train")
    to_first_step = json.loads(result_file.read_text())["seconds_to_first_step"]
    written = result_file.stat().st_mtime
    first_to_last = last_step - begin - to_first_step
    return Launch(to_first_step, first_to_last, written - last_step, end - written)


def _table(launches: Sequence[Launch]) -> TextTable:
    header = ("seconds", "median", *(f"round {number}" for number in range(1, len(launches) + 1)))
    table = TextTable("Start and stop", header)
    for field, text in (
        ("to_first_step", "from the command to the first step"),
        ("first_to_last_step", f"from the first step to the last, {STEPS}"),
        ("to_summary", "from the last step to the summary: evaluation, checkpoint, curves"),
        ("stop", "from the summary to the end of the last process"),
    ):
        values = [getattr(each, field) for each in launches]
        table.rows.append((text, f"{statistics.median(values):.2f}", *(f"{value:.2f}" for value in values)))
    return table
