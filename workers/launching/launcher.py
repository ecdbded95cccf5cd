"""The launcher: starts every role of a cluster on this machine, watches them, and says who failed.

It does nothing that the roles need: started by hand they do the same. What it adds is speed (torch is
imported once, in a server process from which the roles are forked), logs, a witness of how a process
died, and another start for a run that has lost a role.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Self

from rich.console import Console

from hybrid.config import RunConfig
from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from workers.cluster_task import Task, TrainTask
from workers.console.messages import print_line
from workers.console.terminal import TerminalView
from workers.exit_codes import Cause, ExitCode, Interrupt, ToldError, code_of
from workers.launching import network_namespace
from workers.launching.fork_server import ForkServer
from workers.launching.forked_roles import BrokenServerError
from workers.launching.restarts import Restarts
from workers.launching.role_outcome import Outcome
from workers.launching.role_processes import RoleProcesses
from workers.rendezvous.host_requirements import allow_open_files
from workers.run_folder.remote_run import checkpoint_root
from workers.run_folder.run_state import describe_saved_state
from workers.signals import Stop

# Constructing DDP imports torch._dynamo, which takes as long as torch itself.
_PRELOAD = (
    "torch._dynamo",
    "workers.roles.master",
    "workers.roles.role_main",
    "workers.launching.error_report",
)


def launch(config: RunConfig, folder: Path, task: Task, lock: int) -> None:
    """Run a whole cluster on this machine; returns when the task is done and every process has ended.

    Training that loses a role goes on from its newest checkpoint, with a new start of the whole cluster.

    Args:
        folder: for the roles' logs.
        task: what the cluster is for.
        lock: descriptor of the folder's lock, which every role is given.

    Raises:
        ToldError: a role failed; the message is the first cause.
        HybridError: too few files may be open.
        Interrupt: the user or the system asked to stop.
    """
    allow_open_files(config.cluster)
    with _Screen() as screen, ExitStack() as stack:
        restarts = Restarts(folder, config.cluster.max_restarts)
        server = stack.enter_context(_server(config, folder, screen))
        while True:
            roles = RoleProcesses(server, config, folder)
            # The master gives up by itself; this is for one that cannot be reached.
            seconds = config.cluster.timeout_seconds + 2 * config.cluster.stop_timeout_seconds
            stop = Stop(seconds, roles.ask_to_stop)
            failure = _run(server, roles, config, task, lock, screen, stop)
            if failure is None:
                return
            if not isinstance(task, TrainTask):
                raise ToldError(failure.message, code_of(failure.cause, has_stepped=False))
            if restarts.is_finished():
                screen.say(f"{failure.message}; the run had finished, nothing is lost")
                return
            if failure.cause is Cause.STOPPED:
                raise Interrupt(stop.code or ExitCode.INTERRUPTED, failure.message)
            if roles.is_asked:
                left = describe_saved_state(folder, "launch")
                said = f"{failure.message}; the run was asked to stop; {left}"
                raise ToldError(said, restarts.code_of(failure))
            screen.say(restarts.after(failure))
            task = dataclasses.replace(task, resume=True, started_at=time.time())
            if not server.is_running():
                server = stack.enter_context(_server(config, folder, screen))


@contextmanager
def _server(config: RunConfig, folder: Path, screen: _Screen) -> Iterator[ForkServer]:
    """The server that forks the roles, in a network of their own where that can be."""
    with ForkServer(_PRELOAD) as server:
        if network_namespace.is_wanted(config, checkpoint_root(folder)):
            try:
                server.isolate()
            except OSError as error:
                screen.say(network_namespace.what_is_open(error))
        yield server


def _run(
    server: ForkServer,
    roles: RoleProcesses,
    config: RunConfig,
    task: Task,
    lock: int,
    screen: _Screen,
    stop: Stop,
) -> Outcome | None:
    """One start of a cluster, from its first process to the end of its last; the first failure."""
    section = config.cluster
    with server.listen(section.master_address, section.master_port) as listener:  # the master gets its own
        if (failure := _import(server)) is not None:
            return failure
        secret = Secret.find(section.secret_file) or Secret.fresh()
        screen.is_live = True
        roles.start(task, secret, listener, lock)
    with stop.listening() if isinstance(task, TrainTask) else nullcontext():
        failure = roles.watch()
    roles.end()
    screen.is_live = not roles.has_cleared_screen
    if failure is not None and server.is_isolated:
        return dataclasses.replace(failure, message=failure.message + network_namespace.hint(failure.message))
    return failure


def _import(server: ForkServer) -> Outcome | None:
    """Have the server import everything, which takes seconds and is said; how it fails."""
    if server.has_imported:
        return None
    try:
        with TerminalView() as view:
            view.status("importing PyTorch")
            server.preload()
    except BrokenServerError as error:
        return Outcome(str(error), Cause.REFUSED)
    except ClusterError as error:
        return Outcome(str(error), Cause.KILLED)
    return None


class _Screen:
    """The terminal that the launcher shares with its masters.

    Attributes:
        is_live: whether a master may have its live region there, or have left it there when it was killed.
    """

    is_live = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.is_live = True  # at least the ^C that the terminal shows
        self._leave()

    def _leave(self) -> None:
        """Go below the live region; no master draws any more."""
        console = Console()
        console.show_cursor()
        if self.is_live and console.is_terminal:
            console.line()
        self.is_live = False

    def say(self, line: str) -> None:
        """Tell the user of something that does not end the launch."""
        self._leave()
        print_line(f"hybrid launch: {line}", to_stderr=True)
