"""A run on several hosts that are killed; its roles are started again, as by a scheduler."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from support.commands import Command
from support.host_roles import MASTER, placed, started_on
from support.hosts import Switch

from chaos_run.running import POLL_SECONDS, STEP, DisturbedRun, Kill, Plan
from chaos_run.victims import phase_of
from hybrid.errors import HybridError

KILLED, UNPLUGGED = "SIGKILL", "unplugged"
_COUNTS = (2, 2)  # trainers and workers
_START_SECONDS = 20  # a master gives up on roles whose host was killed before they registered
_SILENT_SECONDS = 120.0


class HostsRun(DisturbedRun):
    """A run on hosts that are network namespaces, for the length of a ``with`` block.

    Args:
        arguments: arguments of ``hybrid master``.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], num_hosts: int) -> None:
        self.folder = folder
        cache = folder.with_name("prepared")  # in the folder that all hosts share
        start = f"cluster.start_timeout_seconds={_START_SECONDS}"
        own = [start, f"data.cache_folder={cache}", f"run.folder={folder}"]
        values = [text for each in own for text in ("--set", each)]
        self._arguments = ["--resume", "auto", *values, *arguments]
        self._num_hosts = num_hosts
        self._starts = ExitStack()

    def __enter__(self) -> HostsRun:
        output = self.folder.with_name(f"{self.folder.name}.output")
        output.mkdir()
        with ExitStack() as stack:
            self._switch = stack.enter_context(Switch(output))
            self._hosts = [self._switch.host(self.folder.parent) for _ in range(self._num_hosts)]
            stack.enter_context(self._starts)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def await_end(self) -> None:
        """Wait for the end of the run; raise HybridError if it fails or makes no progress."""
        while self._pass_time(1.0, []):
            pass
        code = self._roles[MASTER].wait(_SILENT_SECONDS).code
        if code:
            raise HybridError(self._roles[MASTER].stderr.rstrip().rpartition("\n")[2])
        self._await_roles(list(self._roles))

    def _start(self) -> None:
        self._roles = self._starts.enter_context(started_on(placed(self._hosts, *_COUNTS), self._arguments))

    def _await_step(self, kills: list[Kill]) -> bool:
        """Wait until the run takes a step after its last start; return False if it has ended."""
        while STEP not in self._output_since_start() and self._pass_time(POLL_SECONDS, kills):
            pass
        return self._pass_time(0.0, kills)

    def _has_ended(self) -> bool:
        self._check_progress(self._output_since_start())
        return not self._roles[MASTER].processes()

    def _output_since_start(self) -> str:
        return f"\n{self._roles[MASTER].stdout}"

    def _kill(self, plan: Plan, chance: random.Random) -> Kill:
        """Kill a host, check that all other roles end by themselves, and start all roles again."""
        host = chance.choice(self._hosts)
        how = UNPLUGGED if chance.random() < plan.freeze else KILLED
        kill = Kill(host.name, how, phase_of(self.folder, self._output_since_start()))
        self._killed_at = time.monotonic()
        if how == UNPLUGGED:
            self._switch.down(host)
        places = placed(self._hosts, *_COUNTS)
        host.kill()
        self._await_roles([role for role, place in places.items() if place is not host])
        self._starts.close()
        number = self._hosts.index(host)
        self._hosts[number] = self._switch.host(self.folder.parent, number=number)
        self._start()
        return kill

    def _await_roles(self, roles: Sequence[str]) -> None:
        for role in roles:
            command: Command = self._roles[role]
            try:
                command.wait(_SILENT_SECONDS)
            except AssertionError as error:
                raise HybridError(f"{role} has not ended: {error}") from error
