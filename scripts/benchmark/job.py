"""The job of a measured system, in the environment variable ``BENCH_JOB``, and its measurement."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmark.workloads import WORKLOADS, Workload

VARIABLE = "BENCH_JOB"


@dataclass(frozen=True)
class Job:
    """Steps of a workload.

    Attributes:
        num_warm_up, num_steps: number of steps before the timed steps, and of timed steps.
        bench_pid: the process whose descendants are the processes of the system.
        result: path of the JSON file for seconds, CPU-seconds and losses.
    """

    workload_name: str
    num_warm_up: int
    num_steps: int
    bench_pid: int
    result: str

    @classmethod
    def from_environment(cls) -> Job:
        """Return the job of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def to_json(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.workload_name]

    def measure(self, train: Callable[[range], list[float]]) -> None:
        """Train all steps, and write the result. All processes of the system must be running meanwhile.

        Args:
            train: takes some steps, and returns for each step the mean loss over the global batch.
        """
        total = self.num_warm_up + self.num_steps
        losses = train(range(self.num_warm_up))
        cpu_seconds, start = -_cpu_seconds(self.bench_pid), time.perf_counter()
        losses += train(range(self.num_warm_up, total))
        seconds = time.perf_counter() - start
        cpu_seconds += _cpu_seconds(self.bench_pid)
        self._write({"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses})

    def add_result(self, name: str, value: object) -> None:
        """Add a value to the written result."""
        self._write(json.loads(Path(self.result).read_text(encoding="utf-8")) | {name: value})

    def _write(self, result: dict[str, object]) -> None:
        Path(self.result).write_text(json.dumps(result), encoding="utf-8")


def _cpu_seconds(pid: int) -> float:
    """Return the user and system time of the descendants of a process, and of their ended children."""
    times = [process.cpu_times() for process in psutil.Process(pid).children(recursive=True)]
    return math.fsum(t.user + t.system + t.children_user + t.children_system for t in times)
