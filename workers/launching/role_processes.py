"""The processes of one start of a cluster: started, supervised and ended, in whatever state they are."""

import dataclasses
import logging
import os
import signal
import socket
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.errors import ClusterError, HybridError
from hybrid.security.secret import Secret
from hybrid.storage.private_files import make_folder, open_file
from hybrid.topology import MASTER, Role, RoleKind
from hybrid.user_code.tracebacks import log_traceback
from workers.cluster_task import ScriptTask, Task, TrainTask
from workers.console.messages import Verbosity, logging_to_stderr, verbosity
from workers.console.output_stream import tolerate_lost_output
from workers.exit_codes import Cause, ExitCode, Interrupt, exit_code
from workers.launching.fork_server import Ended, ForkServer, Started
from workers.launching.role_failure import RoleFailure, RoleProcess, describe
from workers.rendezvous.interrupt import end_now
from workers.rendezvous.master_address import MasterAddress
from workers.run_folder.run_paths import log_path, run_write_errors
from workers.signals import STOP_REQUEST

# After the first failure, another role may still report the cause, or be seen to have been killed.
_GRACE_SECONDS = {Cause.KILLED: 0.0, Cause.STARVED: 0.0, Cause.SILENT: 2.0, Cause.ECHO: 2.0}
_DEFAULT_GRACE_SECONDS = 0.5
_END_SECONDS = 5.0
_WAIT_SECONDS = 60.0
_LOG = logging.getLogger(__name__)


class RoleProcesses:
    """All roles of a cluster, as processes of this machine.

    Args:
        server: forks them.
        folder: for their logs.

    Attributes:
        is_stop_requested: whether the master was asked to stop.
    """

    def __init__(self, server: ForkServer, config: RunConfig, folder: Path) -> None:
        self._server = server
        self._config = config
        self._folder = folder
        self._processes: dict[str, RoleProcess] = {}
        self._ended_at: float | None = None  # of the first failure, or of the master
        self.is_stop_requested = False

    def start(self, task: Task, secret: Secret, listener: socket.socket, lock: int) -> None:
        """Start every role.

        Args:
            listener: the socket of the rendezvous, for the master.
            lock: descriptor of the run's lock, which every role holds while it lives.

        Raises:
            HybridError: logs cannot be written.
        """
        logs = log_path(self._folder, MASTER).parent
        with run_write_errors(logs):
            make_folder(logs)
        address = MasterAddress(self._config.cluster.master_address, listener.getsockname()[1])
        for role in self._config.cluster.topology.roles:
            source, files = (self._config, [listener.fileno()]) if role == MASTER else (address, [])
            reader, writer = os.pipe()
            reports = Connection(reader, writable=False)
            self._processes[str(role)] = RoleProcess(role, log_path(self._folder, role), reports)
            args = (role, source, self._folder, task, secret, verbosity())
            try:
                self._server.start(str(role), _role_main, args, [writer, lock, *files])
            finally:
                os.close(writer)

    def wait(self) -> RoleFailure | None:
        """Wait until all roles have ended; return the first failure, or None if none failed."""
        while self._running:
            left = _WAIT_SECONDS
            if self._ended_at is not None:  # how long the other roles may take to end by themselves
                graces = [_GRACE_SECONDS.get(each.cause, _DEFAULT_GRACE_SECONDS) for each in self._failures]
                grace = min([2 * self._config.cluster.stop_timeout_seconds, *graces])
                left = self._ended_at + grace - time.monotonic()
            if left <= 0:
                break
            try:
                self._handle_event(left)
            except ClusterError as error:  # with the server, all roles have ended
                return self._first_failure() or RoleFailure(str(error), Cause.KILLED)
        if self._running and not self._failures:
            stuck = ", ".join(str(process.role) for process in self._running)
            return RoleFailure(f"{stuck} did not stop after the master had finished", Cause.LOST)
        return self._first_failure()

    def request_stop(self, code: ExitCode) -> None:
        """Make the master save a checkpoint and stop; called by a signal handler during :meth:`wait`.

        Args:
            code: the exit code of the launcher.

        Raises:
            Interrupt: the master has not started yet.
        """
        if self._master.pid is None:
            raise Interrupt(code)
        self.is_stop_requested = True
        self._server.signal(str(MASTER), STOP_REQUEST)

    @property
    def has_cleared_screen(self) -> bool:
        """Whether the master has removed its live region from the terminal."""
        return self._master.has_ended and (self._master.failure is None or self._master.has_reported)

    def end(self) -> None:
        """Kill every process that still runs."""
        with suppress(ClusterError):  # with the server, all roles have ended
            for process in self._running:
                self._server.signal(str(process.role), signal.SIGKILL)
            deadline = time.monotonic() + _END_SECONDS
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._handle_event(left)

    @property
    def _master(self) -> RoleProcess:
        return self._processes[str(MASTER)]

    @property
    def _running(self) -> list[RoleProcess]:
        return [process for process in self._processes.values() if not process.has_ended]

    @property
    def _failures(self) -> list[RoleFailure]:
        return [process.failure for process in self._processes.values() if process.failure is not None]

    def _handle_event(self, timeout_seconds: float) -> None:
        event = self._server.event(timeout_seconds)
        if isinstance(event, Started):
            self._processes[event.name].pid = event.pid
            _LOG.info("%s runs as process %d", event.name, event.pid)
        elif isinstance(event, Ended):
            self._processes[event.name].end(event.exit_code)
            _LOG.info("%s ended with exit code %d", event.name, event.exit_code)
            if self._ended_at is None and (event.exit_code or event.name == str(MASTER)):
                self._ended_at = time.monotonic()

    def _first_failure(self) -> RoleFailure | None:
        first = min(self._failures, key=lambda failure: failure.order, default=None)
        if first is None or first.logged_by is None:
            return first
        message = f"{first.message}; see {log_path(self._folder, first.logged_by)}"
        return dataclasses.replace(first, message=message)


def _role_main(
    role: Role,
    source: RunConfig | MasterAddress,
    folder: Path,
    task: Task,
    secret: Secret,
    level: Verbosity,
    reports: int,
    lock: int,
    listener: int | None = None,
) -> None:
    """Run a role in its process, with its output in its log and its failure reported to the launcher.

    Args:
        source: the configuration for the master; the master's address for other roles.
        reports, lock, listener: file descriptors; the lock is only held.
    """
    if not isinstance(task, TrainTask):  # nothing to save; the server has ignored this signal
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    to_launcher = Connection(reports, readable=False)
    path, launchers_stderr = log_path(folder, role), os.dup(2)
    prints = role == (Role(RoleKind.TRAINER, 0) if isinstance(task, ScriptTask) else MASTER)
    try:
        # The output of torch's C++ code goes there too.
        with run_write_errors(path):
            descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except HybridError as error:
        to_launcher.send(describe(role, error))
        end_now(ExitCode.FAILED)
    os.dup2(descriptor, 2)
    if not prints:
        os.dup2(descriptor, 1)
    os.close(descriptor)
    names = ("stdout" if prints else str(path), str(path))
    command = f"hybrid {task.command}"
    with (
        tolerate_lost_output(command, run_continues=True, names=names, report_to=launchers_stderr),
        logging_to_stderr(level, is_role_log=True),
    ):
        _LOG.info("%s started as process %d", role, os.getpid())
        try:
            if role == MASTER:
                signal.signal(STOP_REQUEST, signal.default_int_handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOP_REQUEST])
            from workers.roles import master
            from workers.roles.role_main import serve

            if isinstance(source, MasterAddress):
                serve(role, source, secret)  # the launcher decides on the exit code
            else:
                bound = None if listener is None else socket.socket(fileno=listener)
                master.run(source, task, secret, bound)
        except KeyboardInterrupt as interrupt:
            to_launcher.send(RoleFailure(str(interrupt), Cause.STOPPED))
            end_now(exit_code(interrupt))
        except Exception as error:
            to_launcher.send(describe(role, error))
            log_traceback(error)
            end_now(exit_code(error))  # threads of torch may wait for a lost role
