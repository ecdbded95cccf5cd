"""The master: the only role with opinions. It prepares, creates, runs, watches and stops everything."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, Self

from hybrid import transport
from hybrid.config import RunConfig
from hybrid.data.prepare.dataset_location import ensure_prepared
from hybrid.data.prepare.preparation import cache_folder
from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from hybrid.topology import Topology
from workers.cluster_task import CompareTask, ScriptTask, Task, TrainTask
from workers.console.terminal import TerminalView
from workers.controller.shared_folders import Reach, own_files
from workers.exit_codes import ExitCode, Interrupt, StopMessage, exit_code
from workers.jobs.comparison import Comparison
from workers.jobs.script_job import ScriptJob
from workers.jobs.training_job import Training
from workers.jobs.user_function import FunctionJob
from workers.rendezvous.bootstrap import Cluster, announce_stop, lead
from workers.rendezvous.interrupt import LostRoleError, last_words
from workers.rendezvous.master_address import DEFAULT_PORT, listen
from workers.roles.diagnosis import tell_cause
from workers.run_folder.run_state import RunState

_POLL_SECONDS = 0.05
_ABANDON_SECONDS = 1.0


def run(config: RunConfig, task: Task, secret: Secret, listener: socket.socket | None = None) -> None:
    """The master process: run a task on its cluster, from start to end.

    Args:
        listener: the rendezvous socket, where the launcher has bound it already.

    Raises:
        HybridError: what went wrong first, in one line.
        Interrupt: it was asked to stop, and has.
    """
    code_of = codes_of(task)
    job = _make_job(config, task)
    section = config.cluster
    port = section.master_port or DEFAULT_PORT
    with listener or listen(section.master_address, port) as bound, TerminalView() as view:
        # Reading the data and gathering the roles overlap; neither needs the other.
        view.status(f"waiting for {section.trainers} trainer(s) and {section.workers} worker(s)")
        with (
            _Preparation(config, view, is_wanted=isinstance(task, TrainTask | CompareTask)) as data,
            lead(config, secret, bound, code_of) as cluster,
        ):
            try:
                code = job.run(cluster.topology, data.result, view, _reach(cluster))
            except (transport.RemoteError, transport.LostError, LostRoleError) as error:
                raise tell_cause(cluster, error, job.doing, code_of) from error
            except BaseException as error:
                with suppress(LostRoleError):  # the first error is the one to report
                    announce_stop(cluster, StopMessage(code_of(error), last_words(error)))
                raise
            announce_stop(cluster, StopMessage(code))
    if code is not ExitCode.DONE:
        raise Interrupt(code)


def codes_of(task: Task) -> Callable[[BaseException], ExitCode]:
    """Gives the exit code of a cluster that is ended by an error, as :mod:`exit_codes` has the rule."""
    if not isinstance(task, TrainTask):
        return partial(exit_code, has_stepped=False)
    before = RunState.of(task.folder)
    return lambda error: exit_code(error, RunState.of(task.folder).has_stepped_since(before))


def _reach(cluster: Cluster) -> Reach:
    here = own_files()
    return Reach([role for role, member in cluster.members.items() if member.files != here])


class _Job(Protocol):
    """What a task comes to; ``doing`` says where in it a failure came."""

    doing: str

    def run(self, topology: Topology, data: Callable[[], Path], view: TerminalView, reach: Reach) -> ExitCode:
        """Do it, on a cluster that is there.

        Args:
            data: gives the folder of the prepared data, once it is there.
            reach: whether other roles see the folders that they are to share with this one.

        Returns:
            what to end with: DONE where it has come to its end, else what it was asked to stop with.
        """
        ...


def _make_job(config: RunConfig, task: Task) -> _Job:
    if isinstance(task, TrainTask):
        return Training(config, task)
    if isinstance(task, CompareTask):
        return Comparison(config, task.steps)
    if isinstance(task, ScriptTask):
        return ScriptJob(config, task.path, task.arguments, task.snapshot)
    return FunctionJob(config, task.function)


class _Preparation:
    """Prepares the data of a run in a thread that does not keep a process alive which fails meanwhile.

    The thread prints nothing itself: at the end of a process, one that holds stdout would abort it.
    """

    def __init__(self, config: RunConfig, view: TerminalView, is_wanted: bool) -> None:
        self._config = config
        self._view = view
        self._said: SimpleQueue[str] = SimpleQueue()
        self._folder: Future[Path] = Future()
        self._is_wanted = is_wanted
        self._thread = threading.Thread(target=self._run, name="prepare", daemon=True)
        if is_wanted:
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What is half built is removed by the thread; if it cannot in time, by the next preparation.
        self._is_wanted = False
        if self._thread.is_alive():
            self._thread.join(_ABANDON_SECONDS)

    def result(self) -> Path:
        """The folder of the prepared data, once it is there; says meanwhile what is going on.

        Prepares it now, where nobody was known to want it.
        """
        if not self._is_wanted:
            self._is_wanted = True
            self._thread.start()
        while not self._folder.done() or not self._said.empty():
            with suppress(Empty):
                self._view.status(self._said.get(timeout=_POLL_SECONDS))
        return self._folder.result()

    def _run(self) -> None:
        try:
            cache = cache_folder(self._config)
            self._folder.set_result(ensure_prepared(self._config, cache, self._said.put, self._check))
        except BaseException as error:  # raised where the result is asked for
            self._folder.set_exception(error)

    def _check(self) -> None:
        if not self._is_wanted:
            raise ClusterError("the preparation of the data was abandoned, since the run has ended")
