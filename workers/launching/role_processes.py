"""The processes of one start of a cluster: started, watched, and ended, whatever state they are in."""

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
from workers.launching.fork_server import ForkServer
from workers.launching.forked_roles import Ended, Started
from workers.launching.role_outcome import Child, Outcome, outcome_pipe
from workers.rendezvous.interrupt import end_now
from workers.rendezvous.master_address import MasterAddress
from workers.run_folder.run_paths import log_path, run_write_errors
from workers.signals import ASK_SIGNAL

# Who was told of a failure may still say what it was, and one that was killed be seen to have been.
_GRACE_SECONDS = {Cause.KILLED: 0.0, Cause.STARVED: 0.0, Cause.SILENT: 2.0, Cause.ECHO: 2.0}
_GRACE_SECONDS_OF_OTHERS = 0.5
_END_SECONDS = 5.0
_WAIT_SECONDS = 60.0
_LOG = logging.getLogger(__name__)


class RoleProcesses:
    """All roles of a cluster, as processes of this machine.

    Args:
        server: forks them.
        folder: for their logs.

    Attributes:
        is_asked: whether the master has been asked to stop.
    """

    def __init__(self, server: ForkServer, config: RunConfig, folder: Path) -> None:
        self._server = server
        self._config = config
        self._folder = folder
        self._children: dict[str, Child] = {}
        self._ended_at: float | None = None  # when the first failed, or the master was done
        self.is_asked = False

    def start(self, task: Task, secret: Secret, listener: socket.socket, lock: int) -> None:
        """Start every role.

        Args:
            listener: the rendezvous socket, which the master gets.
            lock: descriptor of the run's lock, which every role holds as long as it lives.

        Raises:
            HybridError: there is no room for logs.
        """
        logs = log_path(self._folder, MASTER).parent
        with run_write_errors(logs):
            make_folder(logs)
        address = MasterAddress(self._config.cluster.master_address, listener.getsockname()[1])
        for role in self._config.cluster.topology.roles:
            place, files = (self._config, [listener.fileno()]) if role == MASTER else (address, [])
            outcomes, writer = outcome_pipe()
            self._children[str(role)] = Child(role, log_path(self._folder, role), outcomes)
            args = (role, place, self._folder, task, secret, verbosity())
            try:
                self._server.start(str(role), _role_main, args, [writer, lock, *files])
            finally:
                os.close(writer)

    def watch(self) -> Outcome | None:
        """Wait until all have ended; the first failure, or None where all ended in peace."""
        while self._running and (left := self._seconds_left()) > 0:
            try:
                self._take_event(left)
            except ClusterError as error:  # with the server, all have ended
                return self._first_failure() or Outcome(str(error), Cause.KILLED)
        if self._running and not self._failures:
            stuck = ", ".join(str(child.role) for child in self._running)
            return Outcome(f"{stuck} did not stop after the master had finished", Cause.LOST)
        return self._first_failure()

    def ask_to_stop(self, code: ExitCode) -> None:
        """Have the master save where it is, and end; called by a signal handler while they are watched.

        Args:
            code: that the launcher is to end with.

        Raises:
            Interrupt: it is not there yet.
        """
        if self._master.pid is None:
            raise Interrupt(code)
        self.is_asked = True
        self._server.signal(str(MASTER), ASK_SIGNAL)

    @property
    def has_cleared_screen(self) -> bool:
        """Whether nothing of the master's live region is left on a terminal, since it has ended by itself."""
        return self._master.has_ended and (self._master.failure is None or self._master.has_told)

    def end(self) -> None:
        """See that every process has ended."""
        with suppress(ClusterError):  # with the server, all have ended
            for child in self._running:
                self._server.signal(str(child.role), signal.SIGKILL)
            deadline = time.monotonic() + _END_SECONDS
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._take_event(left)

    @property
    def _master(self) -> Child:
        return self._children[str(MASTER)]

    @property
    def _running(self) -> list[Child]:
        return [child for child in self._children.values() if not child.has_ended]

    @property
    def _failures(self) -> list[Outcome]:
        return [child.failure for child in self._children.values() if child.failure is not None]

    def _take_event(self, timeout_seconds: float) -> None:
        event = self._server.event(timeout_seconds)
        if isinstance(event, Started):
            self._children[event.name].pid = event.pid
            _LOG.info("%s runs as process %d", event.name, event.pid)
        elif isinstance(event, Ended):
            self._children[event.name].end(event.exit_code)
            _LOG.info("%s ended with exit code %d", event.name, event.exit_code)
            if self._ended_at is None and (event.exit_code or event.name == str(MASTER)):
                self._ended_at = time.monotonic()

    def _seconds_left(self) -> float:
        """How long the others may take to end by themselves."""
        if self._ended_at is None:
            return _WAIT_SECONDS
        grace = 2 * self._config.cluster.stop_timeout_seconds
        for failure in self._failures:
            grace = min(grace, _GRACE_SECONDS.get(failure.cause, _GRACE_SECONDS_OF_OTHERS))
        return self._ended_at + grace - time.monotonic()

    def _first_failure(self) -> Outcome | None:
        first = min(self._failures, key=lambda failure: failure.order, default=None)
        if first is None or first.logged_by is None:
            return first
        message = f"{first.message}; see {log_path(self._folder, first.logged_by)}"
        return dataclasses.replace(first, message=message)


def _role_main(
    role: Role,
    place: RunConfig | MasterAddress,
    folder: Path,
    task: Task,
    secret: Secret,
    level: Verbosity,
    outcomes: int,
    lock: int,
    listener: int | None = None,
) -> None:
    """What each process runs: its role, with its output in its log and its failure told to the launcher.

    Args:
        place: the configuration, of the master; of others where that is, which tells them the rest.
        outcomes, lock, listener: file descriptors; the lock is only held.
    """
    if not isinstance(task, TrainTask):  # there is nothing to save; the server ignores what stops a launch
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    told = Connection(outcomes, readable=False)
    path, launchers_stderr = log_path(folder, role), os.dup(2)
    try:
        _log_to(path, keep_stdout=role == _printing_role(task))
    except HybridError as error:
        told.send(_outcome(role, error))
        end_now(ExitCode.FAILED)
    names = ("stdout" if role == _printing_role(task) else str(path), str(path))
    with (
        tolerate_lost_output(
            f"hybrid {task.command}", run_continues=True, names=names, report_to=launchers_stderr
        ),
        logging_to_stderr(level, is_role_log=True),
    ):
        _LOG.info("%s started as process %d", role, os.getpid())
        try:
            if role == MASTER:
                signal.signal(ASK_SIGNAL, signal.default_int_handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [ASK_SIGNAL])
            _be(role, place, task, secret, listener)
        except KeyboardInterrupt as interrupt:
            told.send(Outcome(str(interrupt), Cause.STOPPED))
            end_now(exit_code(interrupt))
        except Exception as error:
            told.send(_outcome(role, error))
            log_traceback(error)
            end_now(exit_code(error))  # threads of torch may wait for a role that is gone


def _be(
    role: Role, place: RunConfig | MasterAddress, task: Task, secret: Secret, listener: int | None
) -> None:
    from workers.roles import master
    from workers.roles.role_main import serve

    if isinstance(place, MasterAddress):
        serve(role, place, secret)  # the launcher knows what to end with
    else:
        master.run(place, task, secret, None if listener is None else socket.socket(fileno=listener))


def _printing_role(task: Task) -> Role:
    """Whose output is for the screen."""
    return Role(RoleKind.TRAINER, 0) if isinstance(task, ScriptTask) else MASTER


def _outcome(role: Role, error: Exception) -> Outcome:
    try:
        from workers.launching.error_report import describe
    except ImportError:  # of what has failed already
        return Outcome(f"{role}: {type(error).__name__}: {' '.join(str(error).split())}", Cause.EXCEPTION)
    return describe(role, error)


def _log_to(path: Path, keep_stdout: bool) -> None:
    """Send what this process prints, torch's own messages too, to its log; the master keeps its screen."""
    with run_write_errors(path):
        descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    if not keep_stdout:
        os.dup2(descriptor, 1)
    os.close(descriptor)
