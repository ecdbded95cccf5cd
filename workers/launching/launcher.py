"""The launcher: starts every role of a cluster on this machine, supervises them, and reports failures.

Roles that are started by hand do the same work. The launcher adds a fast start (torch is imported once, in a
server process that forks the roles), log files, exit codes of killed processes, and restarts.
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
from workers.exit_codes import Cause, ExitCode, Interrupt, ReportedError, code_of
from workers.launching import network_namespace
from workers.launching.fork_server import BrokenServerError, ForkServer
from workers.launching.restarts import Restarts
from workers.launching.role_failure import RoleFailure
from workers.launching.role_processes import RoleProcesses
from workers.rendezvous.host_requirements import allow_open_files
from workers.run_folder.run_access import checkpoint_root
from workers.run_folder.run_state import describe_saved_state
from workers.signals import StopRequest

# DDP imports torch._dynamo, which takes as long as torch itself.
_PRELOAD = ("torch._dynamo", "workers.roles.master", "workers.roles.role_main")


def launch(config: RunConfig, folder: Path, task: Task, lock: int) -> None:
    """Run a cluster on this machine; return when the task is done and every process has ended.

    A training run that loses a role is restarted from its newest checkpoint.

    Args:
        folder: for the roles' logs.
        task: the work of the cluster.
        lock: descriptor of the folder's lock, which every role gets.

    Raises:
        ReportedError: a role failed; the message is the first cause.
        HybridError: the limit of open files is too low.
        Interrupt: the user or the system requested a stop.
    """
    allow_open_files(config.cluster)
    with _Screen() as screen, ExitStack() as stack:
        restarts = Restarts(folder, config.cluster.max_restarts)
        server = stack.enter_context(_start_server(config, folder, screen))
        while True:
            roles = RoleProcesses(server, config, folder)
            # The master has its own timeout; this one is for a master that cannot be reached.
            seconds = config.cluster.timeout_seconds + 2 * config.cluster.stop_timeout_seconds
            stop = StopRequest(seconds, roles.request_stop)
            failure = _run_once(server, roles, config, task, lock, screen, stop)
            if failure is None:
                return
            if not isinstance(task, TrainTask):
                raise ReportedError(failure.message, code_of(failure.cause, has_stepped=False))
            if restarts.is_finished():
                screen.report(f"{failure.message}; the run had finished, nothing is lost")
                return
            if failure.cause is Cause.STOPPED:
                raise Interrupt(stop.code or ExitCode.INTERRUPTED, failure.message)
            if roles.is_stop_requested:
                state = describe_saved_state(folder, "launch")
                message = f"{failure.message}; the run was asked to stop; {state}"
                raise ReportedError(message, restarts.code_of(failure))
            screen.report(restarts.after(failure))
            task = dataclasses.replace(task, resume=True, started_at=time.time())
            if not server.is_running():
                server = stack.enter_context(_start_server(config, folder, screen))


@contextmanager
def _start_server(config: RunConfig, folder: Path, screen: _Screen) -> Iterator[ForkServer]:
    """Start the server that forks the roles, in a network namespace if possible."""
    with ForkServer(_PRELOAD) as server:
        if network_namespace.is_wanted(config, checkpoint_root(folder)):
            try:
                server.isolate()
            except OSError as error:
                screen.report(network_namespace.describe_exposure(error))
        yield server


def _run_once(
    server: ForkServer,
    roles: RoleProcesses,
    config: RunConfig,
    task: Task,
    lock: int,
    screen: _Screen,
    stop: StopRequest,
) -> RoleFailure | None:
    """Start a cluster and wait until all its processes have ended; return the first failure."""
    section = config.cluster
    with server.listen(section.master_address, section.master_port) as listener:  # the master gets a copy
        if not server.has_imported:
            try:
                with TerminalView() as view:
                    view.status("importing PyTorch")
                    server.preload()
            except ClusterError as error:
                is_broken = isinstance(error, BrokenServerError)
                return RoleFailure(str(error), Cause.REFUSED if is_broken else Cause.KILLED)
        secret = Secret.find(section.secret_file) or Secret.fresh()
        screen.has_region = True
        roles.start(task, secret, listener, lock)
    with stop.handling_signals() if isinstance(task, TrainTask) else nullcontext():
        failure = roles.wait()
    roles.end()
    screen.has_region = not roles.has_cleared_screen
    if failure is not None and server.is_isolated:
        return dataclasses.replace(failure, message=failure.message + network_namespace.hint(failure.message))
    return failure


class _Screen:
    """The terminal that the launcher shares with the masters of its starts.

    Attributes:
        has_region: whether the live region of a master, perhaps a killed one, may be on the terminal.
    """

    has_region = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.has_region = True  # at least the ^C that the terminal shows
        self._leave_region()

    def _leave_region(self) -> None:
        """Move the cursor below the live region."""
        console = Console()
        console.show_cursor()
        if self.has_region and console.is_terminal:
            console.line()
        self.has_region = False

    def report(self, line: str) -> None:
        """Print an event that does not end the launch."""
        self._leave_region()
        print_line(f"hybrid launch: {line}", to_stderr=True)
