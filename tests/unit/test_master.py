"""The failure that the master reports, and the folders that it checks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from hybrid.config import RunConfig
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind, Topology
from hybrid.transport import Failure, LostError, RemoteError
from workers import master
from workers.cluster_task import TrainTask
from workers.controller.shared_folders import SharedFolders
from workers.exit_codes import ExitCode, Interrupt, StopMessage, exit_code
from workers.rendezvous.bootstrap import JoinedCluster
from workers.rendezvous.heartbeat import Registration
from workers.rendezvous.host_setup import listen
from workers.rendezvous.interrupt import LostRoleError

WORKER = Role(RoleKind.WORKER, 0)


@contextmanager
def lead(*_: object) -> Iterator[JoinedCluster]:
    """Form no cluster; its only worker would have other mounts than the master."""
    worker = Registration(str(WORKER), files="others", network="", host="b")
    yield JoinedCluster(MASTER, Topology(0, 1), cast(Any, None), {WORKER: worker})


def run(job: Callable[[Callable[[], object]], ExitCode], folder: Path) -> None:
    """Run a training task whose job is ``job(data)``, with the function that prepares its data."""

    class Job:
        def __init__(self, *_: object) -> None:
            pass

        def run(self, topology: Topology, data: Callable[[], object], view: object) -> ExitCode:
            return job(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(master, "lead", lead)
        patch.setattr(master, "Training", Job)
        master.run(RunConfig(), TrainTask(folder, False, 0.0), Secret.fresh(), listen("127.0.0.1", 0))


def test_role_lost_at_the_end_hides_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def announce_stop(*_: object) -> None:
        raise LostRoleError("lost worker 0")

    def fail(data: object) -> ExitCode:
        raise ValueError("the first error")

    monkeypatch.setattr(SharedFolders, "check_run", lambda *_: None)
    monkeypatch.setattr(master, "announce_stop", announce_stop)
    with pytest.raises(ValueError, match="first"):
        run(fail, tmp_path)


def test_remote_roles_check_run_and_prepared_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checked: list[object] = []

    def check(folders: SharedFolders, folder: Path) -> None:
        checked.append(([*folders.remote_roles], folder))

    monkeypatch.setattr(SharedFolders, "check_run", check)
    monkeypatch.setattr(SharedFolders, "check_data", check)
    monkeypatch.setattr(master, "ensure_prepared", lambda *_: Path("prepared"))
    monkeypatch.setattr(master, "announce_stop", lambda *_: None)
    with pytest.raises(Interrupt):
        run(lambda data: ExitCode.AGAIN if data() == Path("prepared") else ExitCode.DONE, tmp_path)
    assert checked == [([WORKER], tmp_path), ([WORKER], Path("prepared"))]


@pytest.mark.parametrize("interrupted", ["diagnosis", "announcement"])
def test_interrupt_during_diagnosis_is_reported(interrupted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection and the heartbeat of a lost role end at nearly the same time."""
    interrupts = [LostRoleError("lost worker 0")]
    announced: list[str] = []

    def sleep(seconds: float) -> None:
        if interrupted == "diagnosis":
            raise interrupts.pop()

    def announce_stop(cluster: object, message: StopMessage) -> None:
        if interrupts:
            raise interrupts.pop()
        announced.append(str(message))

    monkeypatch.setattr("workers.master.time.sleep", sleep)
    monkeypatch.setattr(master, "announce_stop", announce_stop)
    cluster = JoinedCluster(MASTER, Topology(0, 1), cast(Any, None), {})
    cause = master.report_cause(cluster, LostError(WORKER, "broken"), "at step 3", exit_code)
    assert announced == [f"75 {cause}"] == ["75 lost worker 0 at step 3; its log may have the cause"]


@pytest.mark.parametrize(
    ("kind", "is_logged", "is_delayed"),
    [
        ("ClusterError", False, True),
        ("RuntimeError", False, True),
        ("ValueError", True, False),
        ("DataError", False, False),
    ],
)
def test_an_error_that_a_lost_role_may_have_caused_waits_for_the_heartbeat(
    kind: str, is_logged: bool, is_delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("workers.master.time.sleep", waits.append)
    monkeypatch.setattr(master, "announce_stop", lambda *_: None)
    cluster = JoinedCluster(MASTER, Topology(0, 1), cast(Any, None), {})
    error = RemoteError(WORKER, Failure("broken", kind, False, "b", is_logged))
    cause = master.report_cause(cluster, error, "at step 3", exit_code)
    assert str(cause) == "worker 0 on b: broken (at step 3)"
    assert bool(waits) == is_delayed
