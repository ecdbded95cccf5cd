"""Measurement of a system: start it, wait for its result, and end its processes."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmark.gpu_trace import GpuStep
from benchmark.job import VARIABLE, Job
from benchmark.systems import ROOT, SYSTEMS
from benchmark.workloads import WORKLOADS
from hybrid.config.loading import to_toml
from hybrid.errors import HybridError
from workers.run_folder.run_access import scratch_logs

_TIMEOUT_SECONDS = 900.0
_GRACE_SECONDS = 8.0  # between SIGTERM and SIGKILL
_OUTPUT = "output.txt"
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
        result = folder / "result.json"
        job = Job(workload_name, num_warm_up, num_steps, os.getpid(), str(result))
        command = [system.python, "-P", *system.arguments]
        with started(command, folder, {VARIABLE: job.to_json()}) as process:
            try:
                process.wait(_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                raise failure(f"{system.title} did not end within {_TIMEOUT_SECONDS:g} s", folder) from None
        if process.returncode:
            raise failure(f"{system.title} ended with code {process.returncode}", folder)
        values = json.loads(result.read_text(encoding="utf-8"))
    num_samples = num_steps * workload.global_batch
    losses = tuple(values.pop("losses"))
    return Measurement(workload_name, system_name, number, num_samples, **values, losses=losses)


@contextmanager
def started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; at the end of the block, terminate it, and kill the processes that remain.

    Args:
        folder: working directory, also for temporary files and for the output.
        environment: additional environment variables.
    """
    paths = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
    variables = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(folder), **environment}
    with (folder / _OUTPUT).open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                descendants = psutil.Process(process.pid).children(recursive=True)
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
                for each in psutil.wait_procs(descendants, timeout=0.0)[1]:
                    each.kill()
            process.kill()
            process.wait()


def failure(what: str, folder: Path) -> MeasurementError:
    """Return the error of a command that was started in ``folder``."""
    lines = (folder / _OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
    return MeasurementError("\n    ".join([f"{what}; its last output:", *lines[-_TAIL_LINES:]]))
