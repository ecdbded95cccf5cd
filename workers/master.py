"""The master: it prepares the data, runs the job on the other roles, stops them, and diagnoses failures."""

import copy
import dataclasses
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from hybrid import transport
from hybrid.config import RunConfig
from hybrid.data.prepare.preparation import ensure_prepared
from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from hybrid.storage.remote_path import StoragePath
from workers.cluster_task import CompareTask, ScriptTask, Task, TrainTask
from workers.console import TerminalView
from workers.controller.script_job import ScriptJob
from workers.controller.shared_folders import SharedFolders, filesystem_id
from workers.exit_codes import Cause, ExitCode, Interrupt, StopMessage, cause_of, exit_code
from workers.jobs.comparison import Comparison
from workers.jobs.training_job import Training
from workers.rendezvous.bootstrap import JoinedCluster, announce_stop, lead
from workers.rendezvous.host_setup import DEFAULT_PORT, listen
from workers.rendezvous.interrupt import LostRoleError, describe_final_error
from workers.run_folder.run_access import RunState, checkpoint_root

# The heartbeat connection of a lost role closes within this time, and then an error names the role.
_HEARTBEAT_SECONDS = 1.0


def report_cause(
    cluster: JoinedCluster, error: ClusterError, when: str, code_of: Callable[[BaseException], ExitCode]
) -> ClusterError:
    """Find the cause of a failure, send the cause to every role in a stop message, and return the cause.

    If the heartbeats report a lost role meanwhile, that loss is the cause. ``code_of`` maps the cause to the
    exit code of the roles. For ``when``, see :func:`diagnose`.
    """
    try:
        cause = diagnose(error, when)
        announce_stop(cluster, StopMessage(code_of(cause), str(cause)))
    except LostRoleError as lost:  # the heartbeat of a role has ended meanwhile
        return report_cause(cluster, lost, when, code_of)
    return cause


def diagnose(error: ClusterError, when: str) -> ClusterError:
    """Return an error for the user: ``error`` with the text ``when``, such as "at step 12", in its message.

    An error of another role stays unchanged if its message is complete. If a lost role may be the cause, wait
    a second. During this time, the heartbeats may raise a LostRoleError, which names the role.
    """
    if isinstance(error, LostRoleError):
        error_with_step = copy.copy(error)
        error_with_step.args = (f"{error} {when}; its log may have the cause",)
        return error_with_step
    remote = error if isinstance(error, transport.RemoteError) else None
    if remote is None or not (remote.failure.is_logged or cause_of(remote) is Cause.REFUSED):
        time.sleep(_HEARTBEAT_SECONDS)
    if remote is None:
        return ClusterError(f"{error} ({when})")
    if remote.failure.is_self_contained:
        return remote
    failure = dataclasses.replace(remote.failure, message=f"{remote.failure.message} ({when})")
    return transport.RemoteError(remote.role, failure)


def run(config: RunConfig, task: Task, secret: Secret, listener: socket.socket | None = None) -> None:
    """Run a task on a cluster, as its master, until the task has ended.

    Args:
        listener: the socket of the rendezvous, if the launcher has bound it already.

    Raises:
        HybridError: the first failure, in one line.
        Interrupt: the run has stopped on request.
    """
    code_of = exit_codes_of(task)
    job: Training | Comparison | ScriptJob
    match task:
        case TrainTask():
            job = Training(config, task)
        case CompareTask():
            job = Comparison(config, task)
        case ScriptTask():
            job = ScriptJob(config, task)
    section = config.cluster
    address, port = section.master_endpoint
    with listener or listen(address, port or DEFAULT_PORT) as bound, TerminalView() as view:
        view.status(f"waiting for {section.trainers} trainer(s) and {section.workers} worker(s)")
        with lead(config, secret, bound, code_of) as cluster:
            here, members = filesystem_id(), cluster.members.items()
            remote_roles = [role for role, member in members if member.files != here]
            folders = SharedFolders(remote_roles, config.saving_trainers)

            def prepare_data() -> StoragePath:
                data = ensure_prepared(config, view.status)
                folders.check_data(data)
                return data

            try:
                if isinstance(task, TrainTask):
                    folders.check_run(checkpoint_root(task.folder))
                code = job.run(cluster.topology, prepare_data, view)
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
    """Return a function that maps an error to the exit code of the cluster.

    For a training run, the code depends on whether the run has taken a step since this call.
    """
    if not isinstance(task, TrainTask):
        return partial(exit_code, has_stepped=False)
    before = RunState.of(task.folder)
    return lambda error: exit_code(error, RunState.of(task.folder).has_stepped_since(before))
