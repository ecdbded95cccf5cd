"""A sequence of measurements, with progress."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmark.job import Job
from benchmark.results import Failure, Measurement
from benchmark.running import MeasurementError, measure
from benchmark.systems import System
from hybrid.config import RunConfig


@dataclass(frozen=True)
class Task:
    """A measurement.

    Attributes:
        config: configuration of the run, if the system is this project.
        number: number of the round.
    """

    system: System
    job: Job
    config: RunConfig
    number: int = 1

    @property
    def pair(self) -> tuple[str, str]:
        return self.job.workload.name, self.system.name

    def __str__(self) -> str:
        return f"round {self.number}: {self.job.workload.name}, {self.system.title}"


def measured(tasks: Sequence[Task], console: Console) -> Iterator[Measurement | Failure]:
    """Make measurements one after the other; print a line for each and a progress bar.

    A system that has failed on a workload is skipped there.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    failed: set[tuple[str, str]] = set()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=str(task))
            if task.pair not in failed:
                result = _measure(task)
                if isinstance(result, Failure):
                    failed.add(task.pair)
                console.print(f"{task}: {_line(result)}", markup=False, highlight=False)
                yield result
            progress.advance(bar)


def _measure(task: Task) -> Measurement | Failure:
    try:
        return measure(task.system, task.job, task.config, task.number)
    except MeasurementError as error:
        return Failure(*task.pair, str(error))


def _line(result: Measurement | Failure) -> str:
    if isinstance(result, Failure):
        return result.message
    rate, cpu = result.samples_per_second, result.cpu_seconds_per_million
    return f"{rate:,.0f} samples/s, {cpu:.1f} CPU-seconds per million"
