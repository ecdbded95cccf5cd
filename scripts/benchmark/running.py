"""Measurement of a system: start, read its output, apply a timeout, end all processes."""

import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmark.job import VARIABLE, Job
from benchmark.mark import PREFIX
from benchmark.processes import ERRORS, started
from benchmark.results import Measurement
from benchmark.systems import CONFIG, System
from benchmark.usage import cpu_seconds, memory_bytes, standing_still
from hybrid.config import RunConfig
from hybrid.config.loading import to_toml
from hybrid.errors import HybridError
from workers.run_folder.run_access import scratch_logs

START_SECONDS = 300.0  # imports, tables of gigabytes, compiling, the warm-up
TIMED_SECONDS = 600.0
EXIT_SECONDS = 60.0
_POLL_SECONDS = 0.2
_TAIL_LINES = 15


class MeasurementError(HybridError):
    """A measurement failed; the message ends with the last output of the system."""


def measure(system: System, job: Job, config: RunConfig, number: int = 1) -> Measurement:
    """Measure a system on a job.

    Args:
        config: configuration of the run, for systems whose command names a configuration file.
        number: number of the round.

    Raises:
        MeasurementError: the system failed, took too long, or printed unexpected marks.
    """
    with scratch_logs("bench-") as folder, _running(system, job, config, folder) as run:
        run.await_mark("begin", START_SECONDS)
        before = cpu_seconds(run.process.pid)
        end = run.await_mark("end", TIMED_SECONDS)
        with standing_still(run.process.pid):
            after = cpu_seconds(run.process.pid)
            memory = memory_bytes(run.process.pid)
        run.expect_roles(before, memory)
        run.await_exit(EXIT_SECONDS)
    losses = tuple(end["losses"])
    if len(losses) != job.num_warm_up + job.num_steps:
        raise MeasurementError(f"{system.name} took {len(losses)} steps instead of those of {job.to_text()}")
    return Measurement(
        workload=job.workload.name,
        system=system.name,
        number=number,
        num_samples=job.num_samples,
        seconds=end["seconds"],
        cpu_seconds={role: used - before.get(role, 0.0) for role, used in after.items()},
        memory_bytes=memory,
        losses=losses,
        in_bfloat16=job.workload.is_in_bfloat16,
        parts=1 if system.is_one_process else job.workload.trainers,
    )


@dataclass
class _Run:
    """A running system.

    Attributes:
        lines: output, read by a thread.
        tail: last lines without marks.
        errors: file of standard error, separate so that it does not split marks.
    """

    name: str
    process: subprocess.Popen[str]
    errors: Path
    lines: SimpleQueue[str] = field(default_factory=SimpleQueue)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    def read(self) -> None:
        """Queue every line, to the end of the output."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.put(line)

    def await_mark(self, event: str, timeout_seconds: float) -> dict[str, Any]:
        """Return the next mark, which must have this event."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None  # checked before the queue, which then is complete
            try:
                line = self.lines.get(timeout=_POLL_SECONDS)
            except Empty:
                if has_ended:
                    raise self._error(f"ended with code {self.process.returncode} before {event!r}") from None
                continue
            if not line.startswith(PREFIX):
                self.tail.append(line)
                continue
            mark: dict[str, Any] = json.loads(line.removeprefix(PREFIX))
            if mark["event"] != event:
                raise self._error(f"said {mark['event']!r} where {event!r} was due")
            return mark
        raise self._error(f"did not say {event!r} within {timeout_seconds:g} s")

    def await_exit(self, timeout_seconds: float) -> None:
        """Wait for the end of the system."""
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise self._error(f"did not end within {timeout_seconds:g} s of its last step") from None
        if code:
            raise self._error(f"ended with code {code} after its last step")

    def expect_roles(self, before: Iterable[str], after: Iterable[str]) -> None:
        """Check that the roles from before the timed steps still run after them."""
        if missing := set(before) - set(after):
            names = ", ".join(sorted(missing))
            raise self._error(f"is not whole: its {names} had ended when it was to be looked at")

    def _error(self, what: str) -> MeasurementError:
        errors = self.errors.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        said = [*(line.rstrip("\n") for line in self.tail), *errors]
        return MeasurementError("\n    ".join([f"{self.name} {what}; it printed last:", *said]))


@contextmanager
def _running(system: System, job: Job, config: RunConfig, folder: Path) -> Iterator[_Run]:
    """Start a system, and end all of its processes at the end of the block."""
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    arguments = [str(folder / "config.toml") if a == CONFIG else a for a in system.arguments]
    with started(arguments, folder, {VARIABLE: job.to_text()}) as process:
        run = _Run(system.name, process, folder / ERRORS)
        threading.Thread(target=run.read, name=f"read {system.name}", daemon=True).start()
        yield run
