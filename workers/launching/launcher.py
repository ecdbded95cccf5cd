"""The launcher: starts every role of a cluster on this machine, supervises them, and restarts them.

Roles do the same work if they are started by hand. The launcher adds log files, messages about killed
processes, and restarts. It starts fast, because a server process imports torch once and forks the roles.
"""

import dataclasses
import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from hybrid.config import ClusterSection, RunConfig
from hybrid.errors import ClusterError, ConfigError, HybridError, StorageError
from hybrid.security.secret import Secret
from hybrid.storage.private_files import open_file
from hybrid.storage.remote_path import StoragePath, is_url
from workers.cluster_task import Task, TrainTask
from workers.console import TerminalView, print_line
from workers.exit_codes import Cause, ExitCode, Interrupt, ReportedError, StopRequest, code_of, exit_code
from workers.launching.fork_server import ForkServer
from workers.launching.role_processes import RoleFailure, RoleProcesses
from workers.rendezvous.host_setup import AUTO, LOOPBACK, allow_open_files, is_loopback, listen
from workers.run_folder import run_access
from workers.run_folder.run_access import RESTARTS_FILE, RunState, run_write_errors, script_checkpoints

_METRICS_KEY = "cluster.metrics_port"
# DDP imports torch._dynamo, which takes as long as torch itself.
_PRELOAD = ("torch._dynamo", "workers.master")
# Texts of exceptions that a missing network causes.
_NO_NETWORK_TEXTS = (
    os.strerror(errno.ENETUNREACH),
    "Temporary failure in name resolution",
    "Name or service not known",
    "Could not resolve hostname",  # of object stores
)


def launch(config: RunConfig, folder: Path, task: Task, lock: int) -> None:
    """Run a cluster on this machine; return when the task is done and every process has ended.

    If a role fails and a restart may help, a training run restarts from its newest checkpoint. A script
    restarts only if it has called ``cluster.resume``, and after an exception it never does.

    Args:
        folder: the local folder of the run or script; ``folder/logs`` gets the logs of the roles.
        lock: descriptor of the folder's lock, which every role inherits.

    Raises:
        ReportedError: a role failed, and the cluster is not restarted; the message has the cause.
        HybridError: the cluster cannot start on this host; the message has the reason.
        Interrupt: the user or the system requested a stop.
    """
    allow_open_files(config.cluster)
    with ExitStack() as stack:
        if isinstance(task, TrainTask):
            stack.enter_context(serving_metrics(config.cluster, folder))
        stack.callback(_restore_screen)
        restarts = Restarts(folder, config.cluster.max_restarts)
        server = stack.enter_context(_start_server(config, folder, task, lock))
        while True:
            roles = RoleProcesses(server, config, folder)
            # The master has a shorter timeout. This timeout is for a master that does not react.
            seconds = config.cluster.timeout_seconds + 2 * config.cluster.stop_timeout_seconds
            stop = StopRequest(seconds, roles.request_stop)
            failure = _run_once(roles, task, stop)
            if failure is None:
                return
            if restarts.is_finished(failure):
                _report(task, f"{failure.message}; the run had finished, nothing is lost")
                return
            is_train = isinstance(task, TrainTask)
            if not is_train and (failure.cause is Cause.EXCEPTION or script_checkpoints(folder) is None):
                raise ReportedError(failure.message, code_of(failure.cause, has_stepped=False))
            if failure.cause is Cause.STOPPED:
                raise Interrupt(stop.code or ExitCode.INTERRUPTED, failure.message)
            if stop.is_requested:
                state = run_access.describe_saved_state(folder, "launch")
                message = f"{failure.message}; the run was asked to stop; {state}"
                raise ReportedError(message, restarts.code_of(failure))
            _report(task, restarts.plan_restart(failure))
            if isinstance(task, TrainTask):
                task = dataclasses.replace(task, resume=True, started_at=time.time())
            if not server.is_running():
                server = stack.enter_context(_start_server(config, folder, task, lock))


def serving_metrics(cluster: ClusterSection, folder: Path) -> AbstractContextManager[None]:
    """Return a context that serves metrics on ``cluster.metrics_port``, if set; ConfigError if that fails."""
    if not cluster.metrics_port:
        return nullcontext()
    try:
        from workers.launching.prometheus_server import serving
    except ImportError as error:
        rule = "needs the package prometheus-client; run pip install 'hybrid-parallel[prometheus]'"
        raise ConfigError(_METRICS_KEY, rule) from error
    return serving(listen(cluster.master_endpoint[0], cluster.metrics_port, _METRICS_KEY), folder)


@contextmanager
def _start_server(config: RunConfig, folder: Path, task: Task, lock: int) -> Iterator[ForkServer]:
    """Yield a server that forks roles, with torch imported; in a network namespace if allowed."""
    with ExitStack() as stack:
        server = stack.enter_context(ForkServer(_PRELOAD, [lock]))
        if uses_namespace(config, run_access.checkpoint_root(folder)):
            try:
                server.isolate()
            except OSError as error:
                _report(
                    task,
                    f"no network namespace ({error.strerror}): until all roles are connected, other users of "
                    "this machine can reach their ports (docs/security.md); "
                    'cluster.namespace = "off" hides this line',
                )
                stack.close()  # ends the server, which may have lost its user id
                server = stack.enter_context(ForkServer(_PRELOAD, [lock]))
        with TerminalView() as view, suppress(ClusterError):  # RoleProcesses.start raises it, too
            view.status("importing PyTorch")
            server.preload()
        yield server


def uses_namespace(config: RunConfig, folder: StoragePath) -> bool:
    """Whether a network namespace is allowed, and a run with checkpoints in ``folder`` needs no network."""
    section, data = config.cluster, config.data
    initial = config.train.initial, *(table.initial_path for table in config.tables.values())
    side_paths = chain(*(call["path"] for call in data.join_calls))
    paths = (str(folder), data.cache_folder, *chain(*data.paths.values()), *side_paths, *initial)
    if data.is_topic or any(map(is_url, paths)) or {*section.loggers} - {"tensorboard"}:
        return False  # brokers, stores and loggers need the network
    is_loopback_interface = section.interface in (AUTO, LOOPBACK)
    return section.namespace == "auto" and is_loopback_interface and is_loopback(section.master_endpoint[0])


def namespace_hint(failure: str) -> str:
    """Return a remedy if the message ``failure`` is about a missing network, else an empty text."""
    if not any(text in failure for text in _NO_NETWORK_TEXTS):
        return ""
    return '; the processes of launch have no network unless cluster.namespace = "off"'


def _run_once(roles: RoleProcesses, task: Task, stop: StopRequest) -> RoleFailure | None:
    """Start a cluster, and end it after its task or its first failure; return this failure, or None."""
    try:
        roles.start(task, Secret.find(roles.config.cluster.secret_file) or Secret.fresh())
    except ClusterError as error:
        return RoleFailure(str(error), Cause.KILLED)
    with stop.handling_signals() if isinstance(task, TrainTask) else nullcontext():
        failure = roles.wait()
    roles.end()
    if failure is not None and roles.server.is_isolated:
        return dataclasses.replace(failure, message=failure.message + namespace_hint(failure.message))
    return failure


def _report(task: Task, line: str) -> None:
    _restore_screen()
    print_line(f"hybrid {task.command}: {line}", to_stderr=True)


def _restore_screen() -> None:
    """Clear the progress display that a killed master may have left in the terminal; show the cursor."""
    console = Console()
    if console.is_terminal:
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        console.show_cursor()


class Restarts:
    """Decides on restarts and records them; ``maximum`` limits the restarts without a new checkpoint."""

    def __init__(self, folder: Path, maximum: int) -> None:
        self._folder = folder
        self._maximum = maximum
        self._at_start = RunState.of(folder)
        self._without_checkpoint = 0
        self._first: RoleFailure | None = None  # failure since the last checkpoint

    def plan_restart(self, failure: RoleFailure) -> str:
        """Record a restart, and return a message about it; ReportedError if the run must not restart."""
        before, now = self._at_start, self._state(failure)
        has_stepped = now.has_stepped_since(before)
        if now.resumed_step > before.resumed_step:
            self._without_checkpoint, self._first = 0, None
        self._first = self._first or failure
        if code_of(failure.cause, has_stepped) is ExitCode.FAILED:
            remedy = (
                "; a restart would run out of memory before the first step; free memory, or choose smaller "
                'tables (embedding.dim, data.vocabulary = "hash")'
            )
            message = failure.message + (remedy if failure.cause is Cause.STARVED else "")
            raise ReportedError(message, ExitCode.FAILED)
        if self._without_checkpoint == self._maximum:
            limit = f"{self._maximum} restart(s) without a new checkpoint (cluster.max_restarts)"
            raise ReportedError(self._first.message + (f"; stopped after {limit}" if self._maximum else ""))
        self._without_checkpoint += 1
        self._at_start = now
        start = now.resumed_step
        step = now.logged_step if has_stepped else start
        lost = f"steps {start} to {step - 1} are lost, " if step > start else "nothing is lost, "
        if script_checkpoints(self._folder) is not None:  # only trainers know the step of a script
            lost = ""
        is_first = now.checkpoint_step is None
        next_start = "starting from the beginning" if is_first else f"resuming from step {start}"
        record = {
            "time": round(time.time(), 3),
            "cause": failure.cause.value,
            "message": failure.message,
            "step": step,
            "resumed_step": now.resumed_step,
        }
        path, write_error = self._folder / RESTARTS_FILE, ""
        try:
            with run_write_errors(path), open(path, "a", encoding="utf-8", opener=open_file) as file:
                file.write(f"{json.dumps(record)}\n")
        except HybridError as error:  # the run can continue without the record
            write_error = f"; {error}"
        return f"{failure.message}; {lost}{next_start}{write_error}"

    def code_of(self, failure: RoleFailure) -> ExitCode:
        """Return the exit code after ``failure``, for a run that is not restarted."""
        return code_of(failure.cause, self._state(failure).has_stepped_since(self._at_start))

    def is_finished(self, failure: RoleFailure) -> bool:
        """Return whether the run wrote its result after the last start; then ``failure`` does no harm."""
        result = self._state(failure).result
        return result is not None and result != self._at_start.result

    def _state(self, failure: RoleFailure) -> RunState:
        try:
            return RunState.of(self._folder)
        except StorageError as error:
            raise ReportedError(f"{failure.message}; {error}", exit_code(error)) from error
