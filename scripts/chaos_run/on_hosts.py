"""A run on several hosts, of which some are killed: its roles are started again, as a scheduler does it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from support.commands import Command
from support.host_roles import MASTER, placed, started_on
from support.hosts import Switch

from chaos_run.running import Harmed, Kill, Plan
from chaos_run.victims import phase_of
from hybrid.errors import HybridError

KILLED, UNPLUGGED = "SIGKILL", "unplugged"
_COUNTS = (2, 2)  # trainers and workers
_POLL_SECONDS = 0.02
_START_SECONDS = 20  # after which a master gives up on roles whose host was killed before they came
_SILENT_SECONDS = 120.0
_STEP = "\nstep "


class HostsRun(Harmed):
    """A run whose roles are on hosts; end it by ``with``.

    Args:
        arguments: of ``hybrid master``.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], num_hosts: int) -> None:
        self.folder = folder
        cache = folder.with_name("prepared")  # hosts share the folder in which it is
        start = f"cluster.start_timeout_seconds={_START_SECONDS}"
        own = [start, f"data.cache_folder={cache}", f"run.folder={folder}"]
        self._arguments = [
            "--resume",
            "auto",
            *(text for each in own for text in ("--set", each)),
            *arguments,
        ]
        self._num_hosts = num_hosts
        self._stack, self._starts = ExitStack(), ExitStack()

    def __enter__(self) -> HostsRun:
        output = self.folder.with_name(f"{self.folder.name}.output")
        output.mkdir()
        self._switch = self._stack.enter_context(Switch(output))
        self._hosts = [self._switch.host(self.folder.parent) for _ in range(self._num_hosts)]
        self._stack.enter_context(self._starts)
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def await_end(self) -> None:
        """Return when the run has come to its end; HybridError where it fails, or falls silent."""
        code = self._roles[MASTER].wait(_SILENT_SECONDS).code
        if code:
            raise HybridError(self._roles[MASTER].stderr.rstrip().rpartition("\n")[2])
        self._see_all_end(list(self._roles))

    def _start(self) -> None:
        self._roles = self._starts.enter_context(started_on(placed(self._hosts, *_COUNTS), self._arguments))

    def _await_step(self, kills: list[Kill]) -> bool:
        """Wait until the run is at a step of this start; False where it has ended."""
        deadline = time.monotonic() + _SILENT_SECONDS
        while _STEP not in self._roles[MASTER].stdout:
            if not self._pass_time(_POLL_SECONDS, kills):
                return False
            if time.monotonic() > deadline:
                raise HybridError(f"{self.folder}: no step within {_SILENT_SECONDS:g} s")
        return self._pass_time(0.0, kills)

    def _pass_time(self, seconds: float, kills: list[Kill]) -> bool:
        """Wait, and note when the last kill has been made good; False where the run has ended."""
        deadline = time.monotonic() + seconds
        while True:
            if kills and kills[-1].seconds is None and _STEP in self._roles[MASTER].stdout:
                kills[-1].seconds = time.monotonic() - self._killed_at
            if not self._roles[MASTER].processes():
                return False
            if time.monotonic() >= deadline:
                return True
            time.sleep(_POLL_SECONDS)

    def _kill(self, plan: Plan, chance: random.Random) -> Kill:
        """Kill a host, see that all other roles end by themselves, and start all again."""
        host = chance.choice(self._hosts)
        how = UNPLUGGED if chance.random() < plan.freeze else KILLED
        kill = Kill(host.name, how, phase_of(self.folder, f"\n{self._roles[MASTER].stdout}"))
        self._killed_at = time.monotonic()
        if how == UNPLUGGED:
            self._switch.down(host)
        places = placed(self._hosts, *_COUNTS)
        host.kill()
        self._see_all_end([role for role, place in places.items() if place is not host])
        self._starts.close()
        number = self._hosts.index(host)
        self._hosts[number] = self._switch.host(self.folder.parent, number=number)
        self._start()
        return kill

    def _see_all_end(self, roles: Sequence[str]) -> None:
        for role in roles:
            command: Command = self._roles[role]
            try:
                command.wait(_SILENT_SECONDS)
            except AssertionError as error:
                raise HybridError(f"{role} has not ended: {error}") from error
