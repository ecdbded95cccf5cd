"""Roles of a cluster on hosts."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
from support.commands import HYBRID, Command, eventually, settings, start_process
from support.forked_commands import ForkedCommand
from support.hosts import HOME, Host

from hybrid.security.secret import VARIABLE
from workers.run_folder.run_access import RunState

MASTER = "master"
_SECRET = "7c0f1e5a3b9d48260f6b2e81d4a7935c"


def placed(hosts: Sequence[Host], trainers: int = 1, workers: int = 1) -> dict[str, Host]:
    """Return the host of each role: master and trainers from the first host on, workers from the last one."""
    places = {MASTER: hosts[0]}
    places |= {f"trainer {index}": hosts[index % len(hosts)] for index in range(trainers)}
    return places | {f"worker {index}": hosts[-1 - index % len(hosts)] for index in range(workers)}


@contextmanager
def started_on(places: Mapping[str, Host], arguments: Sequence[object]) -> Iterator[dict[str, Command]]:
    """Start the roles of a cluster by hand, each on its host; ``arguments`` are for the master."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(started_at(host, command_of(name, places, arguments)))
            for name, host in places.items()
        }


def command_of(name: str, places: Mapping[str, Host], arguments: Sequence[object]) -> list[object]:
    """Return the command of a role; only the master has the arguments of the run."""
    kind, _, index = name.partition(" ")
    if kind != MASTER:
        return [kind, "--index", index, "--master", places[MASTER].name]
    counts = {f"{each}s": sum(name.startswith(each) for name in places) for each in ("trainer", "worker")}
    cluster = {"master": places[MASTER].name, **counts}
    return [kind, *settings(cluster=cluster), *arguments]


@contextmanager
def started_at(
    host: Host,
    arguments: Sequence[object],
    environment: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> Iterator[Command]:
    """Start a command of ``hybrid`` on a host; kill its processes at the end of the block.

    Args:
        environment: variables to add.
        before: words before ``hybrid``. With them, the command is a new interpreter; else it is forked.
    """
    output = host.output / f"{host.name}-{uuid.uuid4().hex[:8]}"
    given, text = host.environment({VARIABLE: _SECRET, **(environment or {})}), [*map(str, arguments)]
    if before:
        command = Command(start_process([*host.entering, *before, *HYBRID, *text], given, output), output)
    else:
        command = Command(ForkedCommand(text, HOME, given, output, host.pid), output)
    try:
        yield command
    finally:
        command.kill()


_SECONDS = 300.0
_RESUMING = "\nresuming from step "


class Progress:
    """The progress of a run.

    Args:
        commands: print the output of the master of each start.
    """

    def __init__(self, run: Path, commands: Sequence[Command]) -> None:
        self._run, self._commands = run, commands
        self._step = self._starts = 0

    def await_checkpoint(self) -> None:
        """Wait until the run has started again and has a new checkpoint."""

        def is_there() -> bool:
            starts = sum(command.stdout.count(_RESUMING) for command in self._commands)
            return starts >= self._starts and RunState.of(self._run).resumed_step > self._step

        assert eventually(is_there, _SECONDS), [command.stdout + command.stderr for command in self._commands]
        self._step, self._starts = RunState.of(self._run).resumed_step, self._starts + 1


def process_on(hosts: Sequence[Host], condition: Callable[[psutil.Process], bool]) -> psutil.Process:
    """Return the only process on these hosts that satisfies a condition."""
    found = []
    for process in (each for host in hosts for each in host.processes()):
        with suppress(psutil.NoSuchProcess):
            if condition(process):
                found.append(process)
    (process,) = found
    return process
