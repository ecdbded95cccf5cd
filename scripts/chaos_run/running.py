"""A run that is disturbed, and launched again if its launcher was killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from support.commands import Command, start_process

from chaos_run.victims import LAUNCHER, phase_of, running_roles
from hybrid.errors import HybridError

POLL_SECONDS = 0.02
_SILENT_SECONDS = 120.0
# What a master prints at each start once its data is prepared, and at the start of each line of progress.
_START, STEP = "\nprepared ", "\nstep "


class Usage(NamedTuple):
    """What a role uses at one time."""

    mib: int  # resident memory
    threads: int
    files: int


@dataclass(slots=True)
class Kill:
    """A role that was killed or frozen, or a host that was killed or unplugged.

    Attributes:
        seconds: until the next step; None if the run was disturbed again or ended before.
    """

    role: str
    signal: str
    phase: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Which roles are disturbed, and when.

    Attributes:
        freeze: fraction of the roles that are frozen instead of killed.
        with_launcher: whether the launcher may be killed too.
        early: fraction of the kills that do not wait for a step after the previous kill.
        pause_seconds: maximum time between a step, or the previous kill, and a kill.
    """

    freeze: float
    with_launcher: bool
    early: float
    pause_seconds: float


class DisturbedRun(ABC):
    """A run whose roles or hosts are killed."""

    folder: Path
    _killed_at = _output_at = 0.0
    _output_length = -1  # of the output at ``_output_at``

    def disturb(self, count: int, plan: Plan, chance: random.Random) -> list[Kill]:
        """Kill ``count`` roles or hosts, one after the other; fewer if the run ends before."""
        kills: list[Kill] = []
        while len(kills) < count:
            is_early = chance.random() < plan.early
            if not is_early and not self._await_step(kills):
                break
            if not self._pass_time(chance.uniform(0.0, plan.pause_seconds), kills):
                break
            if (kill := self._kill(plan, chance)) is not None:
                kills.append(kill)
        self._await_step(kills)
        return kills

    @abstractmethod
    def _await_step(self, kills: list[Kill]) -> bool:
        """Wait for a step after the last kill; return False if the run has ended."""

    def _pass_time(self, seconds: float, kills: list[Kill]) -> bool:
        """Wait, and record the recovery from the last kill; return False if the run has ended."""
        deadline = time.monotonic() + seconds
        while not (has_ended := self._has_ended()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            if kills and kills[-1].seconds is None and STEP in self._output_since_start():
                kills[-1].seconds = time.monotonic() - self._killed_at
        return not has_ended

    def _check_progress(self, output: str) -> None:
        """Raise HybridError if ``output`` has been the output of the run for two minutes."""
        if len(output) != self._output_length:
            self._output_at, self._output_length = time.monotonic(), len(output)
        if time.monotonic() - self._output_at > _SILENT_SECONDS:
            raise HybridError(f"{self.folder}: no output from the run for {_SILENT_SECONDS:g} s")

    @abstractmethod
    def _has_ended(self) -> bool:
        """Return whether the run has ended; HybridError if it makes no progress."""

    @abstractmethod
    def _output_since_start(self) -> str:
        """Return the output since the start after the last kill."""

    @abstractmethod
    def _kill(self, plan: Plan, chance: random.Random) -> Kill | None:
        """Kill a role or host; return None if none is running."""


class Run(DisturbedRun):
    """A run in a separate folder, for the length of a ``with`` block.

    Args:
        arguments: arguments of ``hybrid launch``, or of ``hybrid run``.
        script: name of a custom loop of this package, whose logs are then in the folder, too; or empty.

    Attributes:
        usage: of each role, every second while the end of the run is awaited.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], script: str = "") -> None:
        self.folder = folder
        self._arguments = [sys.executable, "-P", "-m", "hybrid"]
        self._environment, self._is_script = dict(os.environ), bool(script)
        self.usage: dict[str, list[Usage]] = {}
        if script:
            folder.mkdir()
            self._environment["TMPDIR"] = str(folder)
            path = str(Path(__file__).with_name(f"chaos_{script}.py"))
            self._arguments += ["run", *arguments, path, "--", str(folder)]
        else:
            self._arguments += ["launch", "--resume", "auto", *arguments, "--set", f"run.folder={folder}"]
        self._num_launches = 0

    def __enter__(self) -> Run:
        try:
            self._launch()
        except BaseException:  # it has started the run
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._command.kill()

    def await_end(self) -> None:
        """Wait for the end of the run; raise HybridError if it fails or makes no progress."""
        while self._pass_time(1.0, []):
            for name, role in running_roles(self._command.processes()).items():
                with suppress(psutil.NoSuchProcess):
                    usage = Usage(role.memory_info().rss >> 20, role.num_threads(), role.num_fds())
                    self.usage.setdefault(name, []).append(usage)

    def _await_step(self, kills: list[Kill]) -> bool:
        """Wait for a step after the last kill; return False if the run has ended."""
        while kills and kills[-1].seconds is None and self._pass_time(POLL_SECONDS, kills):
            pass
        return not self._has_ended()

    def _launch(self) -> None:
        self._num_launches += 1
        output = self.folder.with_name(f"{self.folder.name}-launch-{self._num_launches}.out")
        self._process = start_process(self._arguments, self._environment, output)
        self._command = Command(self._process, output)
        self._length_before_kill = 0
        # The launcher restarts a script only after the script has named the folder from which it resumes.
        while self._is_script and not self._output_since_start() and not self._has_ended():
            time.sleep(POLL_SECONDS)

    def _has_ended(self) -> bool:
        code = self._process.poll()
        if code:
            raise HybridError(self._command.stderr.rstrip().rpartition("\n")[2])
        self._check_progress(self._output())
        return code is not None

    def _output(self) -> str:
        return f"\n{self._command.stdout}"

    def _output_since_start(self) -> str:
        """Return the output since the start after the last kill, from the end of preparation."""
        return self._output()[self._length_before_kill :].partition(_START)[2]

    def _kill(self, plan: Plan, chance: random.Random) -> Kill | None:
        """Kill or freeze a role; return None if no role is running."""
        roles = running_roles(self._command.processes())
        if not roles:
            return None
        name = chance.choice([*sorted(roles), *([LAUNCHER] if plan.with_launcher else [])])
        number = signal.SIGKILL
        if name != LAUNCHER and chance.random() < plan.freeze:
            number = signal.SIGSTOP
        kill = Kill(name, number.name, phase_of(self.folder, self._output_since_start()))
        self._killed_at = time.monotonic()
        self._length_before_kill = len(self._output()) - 1  # includes the end of the last line
        if name == LAUNCHER:
            self._process.kill()
            self._process.wait()
            self._launch()
        else:
            with suppress(psutil.NoSuchProcess):
                roles[name].send_signal(number)
        return kill
