"""Measurement of a system: start it, wait for its result, and end its processes."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from support.commands import Command, start_process

from benchmark.gpu_trace import GpuStep
from benchmark.job import VARIABLE, Job
from benchmark.systems import ROOT, SYSTEMS
from benchmark.workloads import WORKLOADS
from hybrid.config.loading import to_toml
from hybrid.errors import HybridError
from workers.run_folder.run_access import scratch_logs

_TIMEOUT_SECONDS = 900.0
_TAIL_LINES = 15


class MeasurementError(HybridError):
    """A measurement failed; the message ends with the last output of the system."""


@dataclass(frozen=True)
class Measurement:
    """One round of one system on one workload.

    Attributes:
        number: number of the round, from 1; systems are compared within a round.
        num_samples, seconds, cpu_seconds: of the timed steps, over all trainers and processes.
        losses: losses of all steps, including the warm-up.
        gpu: what the GPU of each trainer does in a step; empty without GPUs.
    """

    workload: str
    system: str
    number: int
    num_samples: int
    seconds: float
    cpu_seconds: float
    losses: tuple[float, ...]
    gpu: Sequence[GpuStep] = ()

    @property
    def samples_per_second(self) -> float:
        return self.num_samples / self.seconds

    @property
    def cpu_seconds_per_million(self) -> float:
        """CPU-seconds of all processes per million samples."""
        return self.cpu_seconds / self.num_samples * 1e6

    def __str__(self) -> str:
        return (
            f"{self.samples_per_second:,.0f} samples/s, "
            f"{self.cpu_seconds_per_million:.1f} CPU-seconds per million"
        )


def measure(
    workload_name: str, system_name: str, num_warm_up: int, num_steps: int, number: int
) -> Measurement:
    """Measure a system on a workload.

    Raises:
        MeasurementError: the system failed or took too long.
    """
    workload, system = WORKLOADS[workload_name], SYSTEMS[system_name]
    with scratch_logs("bench-") as folder:
        (folder / "config.toml").write_text(to_toml(workload.config), encoding="utf-8")
        result, output = folder / "result.json", folder / "output"
        job = Job(workload_name, num_warm_up, num_steps, os.getpid(), str(result))
        paths = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
        variables = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(folder), VARIABLE: job.to_json()}
        arguments = [system.python, "-P", *system.arguments]
        command = Command(start_process(arguments, variables, output, folder), output)
        failure = ""
        try:
            if code := command.wait(_TIMEOUT_SECONDS).code:
                failure = f"{system.title} ended with code {code}"
        except AssertionError as error:  # it still runs, or has left processes behind
            failure = f"{system.title}: {str(error).partition(':')[0]}"
        finally:
            command.kill()
        if failure:
            lines = (command.stdout + command.stderr).splitlines()[-_TAIL_LINES:]
            raise MeasurementError("\n    ".join([f"{failure}; its last output:", *lines]))
        values = json.loads(result.read_text(encoding="utf-8"))
    num_samples = num_steps * workload.global_batch
    losses = tuple(values.pop("losses"))
    return Measurement(workload_name, system_name, number, num_samples, **values, losses=losses)
