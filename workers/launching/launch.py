"""The launcher: starts every role of a cluster on this machine, watches them, and says who failed.

It does nothing that the roles need: started by hand they do the same. What it adds is speed (torch is
imported once, in a server process from which the roles are forked), logs, a witness of how a process
died, and another start for a run that has lost a role.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from hybrid.config import ClusterSection, RunConfig
from hybrid.errors import ClusterError
from hybrid.private_files import make_folder
from hybrid.secret import Secret
from hybrid.topology import MASTER
from workers.launching import namespace
from workers.launching.fork_server import ForkServer
from workers.launching.outcome import Outcome
from workers.launching.restarts import Restarts
from workers.launching.role_processes import RoleProcesses
from workers.launching.run_lock import run_lock
from workers.paths import log_path, writing
from workers.reporting.visible import visible
from workers.task import Task, TrainTask

# Constructing DDP imports torch._dynamo, which takes as long as torch itself.
_PRELOAD = ("torch._dynamo", "workers.master", "workers.trainer", "workers.worker", "workers.failure")


def launch(config: RunConfig, folder: Path, task: Task) -> None:
    """Run a whole cluster on this machine; returns when the task is done and every process has ended.

    Training that loses a role goes on from its newest checkpoint, with a new start of the whole cluster.

    Args:
        folder: for the roles' logs.
        task: what the cluster is for.

    Raises:
        ClusterError: a role failed; the message is the first cause.
        KeyboardInterrupt: the user or the system asked to stop.
    """
    with ExitStack() as stack:
        stack.callback(Console().show_cursor)  # a master that was killed could not
        lock = stack.enter_context(run_lock(folder))
        logs = log_path(folder, MASTER).parent
        with writing(logs):
            make_folder(logs)
        restarts = Restarts(folder, config.cluster.max_restarts)
        server = stack.enter_context(_server(config.cluster))
        while (failure := _run(server, config, folder, task, lock)) is not None:
            if not isinstance(task, TrainTask):
                raise ClusterError(failure.message)
            if restarts.is_finished():
                _say(f"{failure.message}; the run had finished, nothing is lost")
                return
            _say(restarts.after(failure))
            task = dataclasses.replace(task, resume=True, started_at=time.time())
            if not server.is_running():
                server = stack.enter_context(_server(config.cluster))


@contextmanager
def _server(section: ClusterSection) -> Iterator[ForkServer]:
    """The server that forks the roles, in a network of their own where that can be."""
    with ForkServer(_PRELOAD) as server:
        if namespace.is_wanted(section):
            try:
                server.isolate()
            except OSError as error:
                _say(namespace.what_is_open(error))
        yield server


def _run(server: ForkServer, config: RunConfig, folder: Path, task: Task, lock: int) -> Outcome | None:
    """One start of a cluster, from its first process to the end of its last; the first failure."""
    roles = RoleProcesses(server, config, folder)
    section = config.cluster
    with server.listen(section.master_address, section.master_port) as listener:  # the master gets its own
        secret = Secret.find(config.cluster.secret_file) or Secret.fresh()
        roles.start(task, secret, listener, lock)
    failure = roles.watch()
    roles.end()
    if failure is not None and server.is_isolated:
        return dataclasses.replace(failure, message=failure.message + namespace.hint(failure.message))
    return failure


def _say(line: str) -> None:
    Console().show_cursor()
    print(f"hybrid launch: {visible(line)}", file=sys.stderr)
