"""Runs that something else than ``launch`` starts again: where they are, and whose processes are where."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from support.commands import Command, eventually
from support.hosts import Host

from workers.run_folder.run_state import newest_step

_SECONDS = 300.0
_GOING_ON = "\nresuming from step "


class Progress:
    """How far a run is.

    Args:
        commands: which print what its master does, in each of its starts.
    """

    def __init__(self, run: Path, commands: Sequence[Command]) -> None:
        self._run, self._commands = run, commands
        self._step = self._starts = 0

    def await_checkpoint(self) -> None:
        """Wait until it has been started once more, and has a checkpoint that it had not before."""

        def is_there() -> bool:
            starts = sum(command.stdout.count(_GOING_ON) for command in self._commands)
            return starts >= self._starts and (newest_step(self._run) or 0) > self._step

        assert eventually(is_there, _SECONDS), [command.stdout + command.stderr for command in self._commands]
        self._step, self._starts = newest_step(self._run) or 0, self._starts + 1


def process_on(hosts: Sequence[Host], is_wanted: Callable[[psutil.Process], bool]) -> psutil.Process:
    """The one process on some hosts that is wanted."""
    found = []
    for process in (each for host in hosts for each in host.processes()):
        with suppress(psutil.NoSuchProcess):
            if is_wanted(process):
                found.append(process)
    (process,) = found
    return process
