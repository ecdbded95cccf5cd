"""Roles of a cluster, each on a host of its own or with others."""

import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from support.commands import HYBRID, Command, settings
from support.first_process import enter
from support.forked_commands import ForkedCommand
from support.hosts import HOME, Host

from hybrid.security.secret import VARIABLE

MASTER = "master"
_SECRET = "7c0f1e5a3b9d48260f6b2e81d4a7935c"


def placed(hosts: Sequence[Host], trainers: int = 1, workers: int = 1) -> dict[str, Host]:
    """Where each role is: master and trainers from the first host on, workers from the last one back."""
    places = {MASTER: hosts[0]}
    places |= {f"trainer {index}": hosts[index % len(hosts)] for index in range(trainers)}
    return places | {f"worker {index}": hosts[-1 - index % len(hosts)] for index in range(workers)}


@contextmanager
def started_on(
    places: Mapping[str, Host],
    arguments: Sequence[object],
    own: Mapping[str, Sequence[object]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Command]]:
    """A cluster whose roles are started by hand, each where it is to be.

    Args:
        arguments: of the run.
        own: of a role, besides.
        environment: as for :func:`started_at`; with it, each has a new interpreter.
    """
    own = own or {}
    before = None if environment is None else ["env"]
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                started_at(
                    host,
                    [*command_of(name, places, arguments), *own.get(name, ())],
                    environment,
                    before=before,
                )
            )
            for name, host in places.items()
        }


def command_of(name: str, places: Mapping[str, Host], arguments: Sequence[object]) -> list[object]:
    """The command of a role, as a user gives it; only the master has the run's arguments."""
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
    *,
    before: Sequence[str] | None = None,
) -> Iterator[Command]:
    """A command of ``hybrid`` on a host; whatever is left of it at the end of the block is killed.

    Args:
        environment: what it has besides the usual, and the secret.
        before: what a user writes before it, which takes a new interpreter; else it is forked.
    """
    output = host.output / f"{host.name}-{uuid.uuid4().hex[:8]}"
    text, given = (
        [str(each) for each in arguments],
        host.environment({VARIABLE: _SECRET, **(environment or {})}),
    )
    if before is not None:
        command = Command(_start_afresh(host, [*before, *HYBRID, *text], given, output), output)
    else:
        command = Command(ForkedCommand(text, HOME, given, output, partial(enter, host.pid)), output)
    try:
        yield command
    finally:
        command.kill()


def _start_afresh(
    host: Host, command: Sequence[str], environment: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    with output.with_suffix(".out").open("wb") as out, output.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            [*host.entering, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
