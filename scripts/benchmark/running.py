"""Running a system under measurement: started, listened to, timed out, and ended whatever happens."""

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
from workers.run_folder.run_paths import scratch_logs

START_SECONDS = 300.0  # imports, tables of gigabytes, compiling, the warm-up
TIMED_SECONDS = 600.0
EXIT_SECONDS = 60.0
_POLL_SECONDS = 0.2
_TAIL_LINES = 15


class MeasurementError(HybridError):
    """A system could not be measured; the message ends with what it printed last."""


def measure(system: System, job: Job, config: RunConfig, number: int = 1) -> Measurement:
    """Run a system on a job, from start to end.

    Args:
        config: of the run, for systems whose command names its file.
        number: of the round.

    Raises:
        MeasurementError: it failed, took too long, or did not say what it should.
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
        lines: what it prints, read by a thread.
        tail: the last of it that were no marks.
        errors: the file of what it prints as errors, apart so that it cuts no mark in two.
    """

    name: str
    process: subprocess.Popen[str]
    errors: Path
    lines: SimpleQueue[str] = field(default_factory=SimpleQueue)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    def read(self) -> None:
        """Hand on every line, to the end of the output."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.put(line)

    def await_mark(self, event: str, timeout_seconds: float) -> dict[str, Any]:
        """The next mark, which must be of this event."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None  # before looking: what it printed is there then
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
        """Wait for its end in peace."""
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise self._error(f"did not end within {timeout_seconds:g} s of its last step") from None
        if code:
            raise self._error(f"ended with code {code} after its last step")

    def expect_roles(self, before: Iterable[str], after: Iterable[str]) -> None:
        """See that no role of before the timed steps is missing after them."""
        if missing := set(before) - set(after):
            names = ", ".join(sorted(missing))
            raise self._error(f"is not whole: its {names} had ended when it was to be looked at")

    def _error(self, what: str) -> MeasurementError:
        errors = self.errors.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        said = [*(line.rstrip("\n") for line in self.tail), *errors]
        return MeasurementError("\n    ".join([f"{self.name} {what}; it printed last:", *said]))


@contextmanager
def _running(system: System, job: Job, config: RunConfig, folder: Path) -> Iterator[_Run]:
    """A system that has been started; nothing is left of it at the end of the block."""
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    arguments = [str(folder / "config.toml") if a == CONFIG else a for a in system.arguments]
    with started(arguments, folder, {VARIABLE: job.to_text()}) as process:
        run = _Run(system.name, process, folder / ERRORS)
        threading.Thread(target=run.read, name=f"read {system.name}", daemon=True).start()
        yield run
