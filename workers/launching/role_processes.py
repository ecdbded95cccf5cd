"""The processes of one start of a cluster: their start, supervision, end and failures.

This module imports torch only in the processes of roles.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.errors import ClusterError, HybridError, shorten
from hybrid.primitives.available_memory import memory_groups
from hybrid.security.secret import Secret
from hybrid.storage.files import open_reader
from hybrid.storage.private_files import make_folder, open_file
from hybrid.topology import MASTER, Role, RoleKind
from hybrid.user_code.user_modules import describe_error, log_traceback, needs_traceback
from workers.cluster_task import ScriptTask, Task, TrainTask
from workers.console import Verbosity, logging_to_stderr, tolerate_lost_output, verbosity
from workers.exit_codes import STOP_REQUEST, Cause, ExitCode, cause_of, exit_code
from workers.launching.fork_server import ForkServer, ProcessEnd
from workers.rendezvous.host_setup import MasterAddress
from workers.rendezvous.interrupt import end_now
from workers.run_folder.run_access import log_path, run_write_errors

# Time to wait after the first failure, because another role may still report the cause, or be killed.
_GRACE_SECONDS = {Cause.KILLED: 0.0, Cause.STARVED: 0.0, Cause.SILENT: 2.0, Cause.ECHO: 2.0}
_DEFAULT_GRACE_SECONDS = 0.5
_END_SECONDS = 5.0
_WAIT_SECONDS = 60.0
_MAX_LOG_BYTES = 4096
_KILL_COUNTERS = ("memory.events", "memory.oom_control")  # in version 2 and 1 of control groups
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoleFailure:
    """The failure of a role."""

    message: str  # one line
    cause: Cause
    # ``time.monotonic()`` when the launcher or the role noticed the failure.
    at: float = field(default_factory=time.monotonic)

    @property
    def order(self) -> tuple[bool, int, float]:
        """A sort key, the likely cause first: kills, requested stops, errors, consequences of errors."""
        consequences = {Cause.STOPPED: -1, Cause.ECHO: 1, Cause.SILENT: 2}
        is_killed = self.cause in (Cause.KILLED, Cause.STARVED)
        return not is_killed, consequences.get(self.cause, 0), self.at


def describe_failure(role: Role, error: Exception, folder: Path) -> RoleFailure:
    """Return the failure that a role reports for ``error``; if a log has the traceback, name the log."""
    from hybrid import transport

    message = str(error) if isinstance(error, HybridError) else f"{role}: {describe_error(error)}"
    logged_by = role if needs_traceback(error) else None
    if isinstance(error, transport.RemoteError):
        logged_by = error.role if error.failure.is_logged else None
    log = "" if logged_by is None else f"; see {log_path(folder, logged_by)}"
    return RoleFailure(shorten(" ".join(message.split())) + log, cause_of(error))


def count_oom_kills(root: Path = Path("/")) -> int:
    """Return the number of kills for lack of memory in this control group or machine; 0 if unknown."""
    counters = [group / name for group in memory_groups(root) for name in _KILL_COUNTERS]
    for path in (*counters, root / "proc/vmstat"):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


@dataclass(slots=True)
class RoleProcess:
    """The process of a role under the launcher."""

    role: Role
    log: Path
    pid: int = 0  # 0 before the start
    has_ended: bool = False
    failure: RoleFailure | None = None  # of the role; None while the process runs and after a normal end
    _oom_kills_before: int = field(default_factory=count_oom_kills)
    _log_bytes_before: int = field(init=False)

    def __post_init__(self) -> None:
        self._log_bytes_before = self.log.stat().st_size if self.log.exists() else 0

    def record_end(self, end: ProcessEnd) -> None:
        """Record that the process has ended, and its failure if it has failed."""
        self.has_ended = True
        if end.exit_code:
            has_report = isinstance(end.report, RoleFailure)
            self.failure = end.report if has_report else self._infer_failure(end.exit_code)

    def _infer_failure(self, exit_code: int) -> RoleFailure:
        process, log = f"{self.role} (pid {self.pid})", ""
        with suppress(FileNotFoundError), open_reader(self.log) as file:
            file.seek(max(self._log_bytes_before, file.seek(0, os.SEEK_END) - _MAX_LOG_BYTES))
            log = file.read().decode(errors="replace")
        if exit_code > 0:
            # A role that waits in torch reports nothing, but its last log line may have the cause.
            before, _, text = log.rstrip("\n").rpartition("\n")[2].partition(f"hybrid {self.role}: ")
            last_line = f": {text}" if text and not before else ""
            message = f"{process} exited with code {exit_code}{last_line}; see {self.log}"
            return RoleFailure(message, Cause.SILENT)
        number = signal.Signals(-exit_code)
        is_oom = number is signal.SIGKILL and count_oom_kills() > self._oom_kills_before
        is_oom |= number is signal.SIGABRT and "std::bad_alloc" in log  # C++ code without memory
        reason = ", probably since memory ran out" if is_oom else ""
        cause = Cause.STARVED if is_oom else Cause.KILLED
        return RoleFailure(f"{process} was killed by {number.name}{reason}; see {self.log}", cause)


@dataclass(eq=False)
class RoleProcesses:
    """All roles of a cluster, as processes of this machine."""

    server: ForkServer
    config: RunConfig
    folder: Path  # for the logs of the roles

    def __post_init__(self) -> None:
        self._processes: dict[str, RoleProcess] = {}
        self._ended_at: float | None = None  # the time of the first failure, or of the master's end

    def start(self, task: Task, secret: Secret) -> None:
        """Start every role; HybridError if the fork server cannot start them."""
        section, calls = self.config.cluster, {}
        for role in section.topology.roles:
            self._processes[str(role)] = RoleProcess(role, log_path(self.folder, role))
            calls[str(role)] = (role, self.config, self.folder, task, secret, verbosity())
        pids = self.server.start(run_role, calls, *section.master_endpoint)
        for name, pid in pids.items():
            self._processes[name].pid = pid
            _LOG.info("%s runs as process %d", name, pid)

    def wait(self) -> RoleFailure | None:
        """Wait for the end of all roles; return the failure to report, or None if no role failed.

        After a failure or the end of the master, the wait is short, so some roles may still run afterwards.
        If no role has failed by then, the roles that still run are reported as stuck.
        """
        while self._running:
            left = _WAIT_SECONDS
            if self._ended_at is not None:  # the other roles get some time to end by themselves
                graces = [_GRACE_SECONDS.get(each.cause, _DEFAULT_GRACE_SECONDS) for each in self._failures]
                grace = min([2 * self.config.cluster.stop_timeout_seconds, *graces])
                left = self._ended_at + grace - time.monotonic()
            if left <= 0:
                break
            try:
                self._handle_event(left)
            except ClusterError as error:  # the server has ended, and all roles with it
                return self._first_failure() or RoleFailure(str(error), Cause.KILLED)
        if self._running and not self._failures:
            stuck = ", ".join(str(process.role) for process in self._running)
            return RoleFailure(f"{stuck} did not stop after the master had finished", Cause.LOST)
        return self._first_failure()

    def request_stop(self) -> None:
        """Make the master save a checkpoint and stop; called by a signal handler during :meth:`wait`."""
        self.server.signal(str(MASTER), STOP_REQUEST)

    def end(self) -> None:
        """Kill all processes that still run, and wait at most some seconds until they have ended."""
        with suppress(ClusterError):  # the server has ended, and all roles with it
            for process in self._running:
                self.server.signal(str(process.role), signal.SIGKILL)
            deadline = time.monotonic() + _END_SECONDS
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._handle_event(left)

    @property
    def _running(self) -> list[RoleProcess]:
        return [process for process in self._processes.values() if not process.has_ended]

    @property
    def _failures(self) -> list[RoleFailure]:
        return [process.failure for process in self._processes.values() if process.failure is not None]

    def _handle_event(self, timeout_seconds: float) -> None:
        event = self.server.event(timeout_seconds)
        if event is not None:
            self._processes[event.name].record_end(event)
            _LOG.info("%s ended with exit code %d", event.name, event.exit_code)
            if self._ended_at is None and (event.exit_code or event.name == str(MASTER)):
                self._ended_at = time.monotonic()

    def _first_failure(self) -> RoleFailure | None:
        return min(self._failures, key=lambda failure: failure.order, default=None)


def run_role(
    role: Role,
    config: RunConfig,
    folder: Path,
    task: Task,
    secret: Secret,
    level: Verbosity,
    listener: socket.socket,
    report: Callable[[RoleFailure], object],
) -> None:
    """Run a role in its process; after a failure, ``report`` it to the launcher and end the process.

    The output goes to the role's log. Only the master (for a script, trainer 0) keeps its standard output.
    """
    if not isinstance(task, TrainTask):  # the server ignores this signal; this task has nothing to save
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    path, launchers_stderr = log_path(folder, role), os.dup(2)
    has_stdout = role == (Role(RoleKind.TRAINER, 0) if isinstance(task, ScriptTask) else MASTER)
    try:
        # Descriptor 2 is replaced, since torch's C++ code writes to it.
        with run_write_errors(path):
            make_folder(path.parent)
            descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except HybridError as error:
        report(describe_failure(role, error, folder))
        end_now(ExitCode.FAILED)
    os.dup2(descriptor, 2)
    if not has_stdout:
        os.dup2(descriptor, 1)
    os.close(descriptor)
    names = ("stdout" if has_stdout else str(path), str(path))
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
            from workers import master
            from workers.rendezvous.bootstrap import serve

            if role == MASTER:
                master.run(config, task, secret, listener)
            else:
                with listener:
                    address = MasterAddress(config.cluster.master_endpoint[0], listener.getsockname()[1])
                serve(role, address, secret)  # the launcher decides on the exit code
        except KeyboardInterrupt as interrupt:
            report(RoleFailure(str(interrupt), Cause.STOPPED))
            end_now(exit_code(interrupt))
        except Exception as error:
            report(describe_failure(role, error, folder))
            log_traceback(error)
            end_now(exit_code(error))  # threads of torch may wait for a lost role
