"""The master: it prepares the data, runs the job on the other roles, stops them, and diagnoses failures."""

import copy
import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self

from hybrid import transport
from hybrid.config import RunConfig
from hybrid.data.prepare.preparation import ensure_prepared
from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from hybrid.storage.remote_path import StoragePath
from workers.cluster_task import CompareTask, FunctionTask, ScriptTask, Task, TrainTask
from workers.console.terminal import TerminalView
from workers.controller.shared_folders import SharedFolders, filesystem_id
from workers.controller.user_code_jobs import FunctionJob, ScriptJob
from workers.exit_codes import ExitCode, Interrupt, StopMessage, exit_code
from workers.jobs.comparison import Comparison
from workers.jobs.training_job import Training
from workers.rendezvous.bootstrap import JoinedCluster, announce_stop, lead
from workers.rendezvous.host_setup import DEFAULT_PORT, listen
from workers.rendezvous.interrupt import LostRoleError, describe_final_error
from workers.run_folder.run_access import RunState

_PING_SECONDS = 2.0
# The heartbeat connection of a lost role closes within this time, and its error names the role.
_HEARTBEAT_SECONDS = 1.0
_POLL_SECONDS = 0.05
_ABANDON_SECONDS = 1.0


def report_cause(
    cluster: JoinedCluster, error: ClusterError, when: str, code_of: Callable[[BaseException], ExitCode]
) -> ClusterError:
    """Diagnose a failure, and report its cause and exit code to every role; see :func:`diagnose`."""
    try:
        cause = diagnose(cluster, error, when)
        announce_stop(cluster, StopMessage(code_of(cause), str(cause)))
    except LostRoleError as lost:  # the heartbeat of a role has ended meanwhile
        return report_cause(cluster, lost, when, code_of)
    return cause


def diagnose(cluster: JoinedCluster, error: ClusterError, when: str) -> ClusterError:
    """Return the error to report, which names the lost roles; ``when`` is text such as "at step 12"."""
    if isinstance(error, LostRoleError):
        error_with_step = copy.copy(error)
        error_with_step.args = (f"{error} {when}; its log may have the cause",)
        return error_with_step
    lost = []
    for role, call in [(role, transport.ping(role, _PING_SECONDS)) for role in cluster.members]:
        try:
            call.wait()
        except transport.LostError:
            lost.append((role, cluster.members[role]))
    if lost and cluster.rendezvous is not None:
        time.sleep(_HEARTBEAT_SECONDS)  # a LostRoleError of the heartbeat, raised here, is more exact
    if len(lost) == len(cluster.members) > 1:
        return ClusterError(f"no role responds to the master any more: {error} ({when})")
    if lost:
        names = ", ".join(f"{role} (host {member.host}, pid {member.pid})" for role, member in lost)
        return ClusterError(f"lost {names} {when}; its log may have the cause")
    if not isinstance(error, transport.RemoteError):
        return ClusterError(f"{error} ({when})")
    if error.failure.is_self_contained:
        return error
    failure = dataclasses.replace(error.failure, message=f"{error.failure.message} ({when})")
    return transport.RemoteError(error.role, failure)


def run(config: RunConfig, task: Task, secret: Secret, listener: socket.socket | None = None) -> None:
    """Run a task on a cluster, as its master, until the task has ended.

    Args:
        listener: the socket of the rendezvous, if the launcher has bound it already.

    Raises:
        HybridError: the first failure, in one line.
        Interrupt: the run has stopped on request.
    """
    code_of = exit_codes_of(task)
    job: Training | Comparison | ScriptJob | FunctionJob
    match task:
        case TrainTask():
            job = Training(config, task)
        case CompareTask():
            job = Comparison(config, task)
        case ScriptTask():
            job = ScriptJob(config, task)
        case FunctionTask():
            job = FunctionJob(config, task.function)
    section = config.cluster
    address, port = section.master_endpoint
    with listener or listen(address, port or DEFAULT_PORT) as bound, TerminalView() as view:
        # The preparation of the data and the rendezvous overlap.
        view.status(f"waiting for {section.trainers} trainer(s) and {section.workers} worker(s)")
        with (
            _Preparation(
                config,
                view,
                starts_now=isinstance(task, TrainTask | CompareTask) and not config.data.is_stream,
            ) as data,
            lead(config, secret, bound, code_of) as cluster,
        ):
            here, members = filesystem_id(), cluster.members.items()
            folders = SharedFolders([role for role, member in members if member.files != here])
            try:
                code = job.run(cluster.topology, data.result, view, folders)
            except (transport.RemoteError, transport.LostError, LostRoleError) as error:
                raise report_cause(cluster, error, job.doing, code_of) from error
            except BaseException as error:
                with suppress(LostRoleError):  # the first error is the one to report
                    announce_stop(cluster, StopMessage(code_of(error), describe_final_error(error)))
                raise
            announce_stop(cluster, StopMessage(code))
    if code is not ExitCode.DONE:
        raise Interrupt(code)


def exit_codes_of(task: Task) -> Callable[[BaseException], ExitCode]:
    """Return a function that returns the exit code of the cluster for an error; see :mod:`exit_codes`."""
    if not isinstance(task, TrainTask):
        return partial(exit_code, has_stepped=False)
    before = RunState.of(task.folder)
    return lambda error: exit_code(error, RunState.of(task.folder).has_stepped_since(before))


class _Preparation:
    """The preparation of the data in a daemon thread, which does not keep a failed process alive.

    The thread prints nothing, because Python aborts if a daemon thread holds the lock of stdout at exit.
    """

    def __init__(self, config: RunConfig, view: TerminalView, starts_now: bool) -> None:
        self._config = config
        self._view = view
        self._statuses: SimpleQueue[str] = SimpleQueue()
        self._folder: Future[StoragePath] = Future()
        self._is_required = starts_now
        self._thread = threading.Thread(target=self._run, name="prepare", daemon=True)
        if starts_now:
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The thread removes unfinished files. If it is too slow, the next preparation removes them.
        self._is_required = False
        if self._thread.is_alive():
            self._thread.join(_ABANDON_SECONDS)

    def result(self) -> StoragePath:
        """Return the folder of the prepared data; wait for it, and show its progress meanwhile."""
        if not self._is_required:
            self._is_required = True
            self._thread.start()
        while not self._folder.done() or not self._statuses.empty():
            with suppress(Empty):
                self._view.status(self._statuses.get(timeout=_POLL_SECONDS))
        return self._folder.result()

    def _run(self) -> None:
        try:
            self._folder.set_result(ensure_prepared(self._config, self._statuses.put, self._check))
        except BaseException as error:  # raised by result
            self._folder.set_exception(error)

    def _check(self) -> None:
        if not self._is_required:
            raise ClusterError("the preparation of the data was abandoned, since the run has ended")
