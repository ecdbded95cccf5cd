"""The failure that the master reports."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybrid import transport
from hybrid.config import RunConfig
from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind, Topology
from hybrid.transport import LostError
from workers import master
from workers.cluster_task import FunctionTask
from workers.exit_codes import StopMessage, exit_code
from workers.rendezvous.bootstrap import JoinedCluster
from workers.rendezvous.host_setup import listen
from workers.rendezvous.interrupt import LostRoleError

WORKER = Role(RoleKind.WORKER, 0)
LOST_ROLE = LostRoleError("lost worker 0 (host b, pid 7)")


def cluster_with_lost_worker(monkeypatch: pytest.MonkeyPatch, error: Exception) -> JoinedCluster:
    """Return a cluster with one worker, whose pings fail with ``error``."""

    def wait() -> None:
        raise error

    monkeypatch.setattr(transport, "ping", lambda *_: SimpleNamespace(wait=wait))
    members = {WORKER: SimpleNamespace(host="b", pid=7)}
    return cast(JoinedCluster, SimpleNamespace(members=members, rendezvous=object()))


def refuse(topology: Topology, config: RunConfig) -> None:
    raise ValueError("the first error")


def test_role_lost_at_the_end_does_not_hide_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def lead(*_: object) -> Iterator[JoinedCluster]:
        yield JoinedCluster(MASTER, Topology(0, 0), cast(Any, None), {})

    def announce_stop(*_: object) -> None:
        raise LostRoleError("lost worker 0")

    monkeypatch.setattr(master, "lead", lead)
    monkeypatch.setattr(master, "announce_stop", announce_stop)
    with pytest.raises(ValueError, match="the first error"):
        master.run(RunConfig(), FunctionTask(f"{__name__}:refuse"), Secret.fresh(), listen("127.0.0.1", 0))


@pytest.mark.parametrize("interrupted", ["diagnosis", "announcement"])
def test_interrupt_during_diagnosis_is_reported_with_activity(
    interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection and the heartbeat of a lost role end at nearly the same time."""
    interrupt = LostRoleError("lost worker 0")
    error = interrupt if interrupted == "diagnosis" else LostError(WORKER, "broken")
    cluster = cluster_with_lost_worker(monkeypatch, error)
    announced: list[str] = []

    def announce_stop(cluster: object, message: StopMessage) -> None:
        if interrupted == "announcement" and not announced:
            announced.append("")
            raise interrupt
        announced.append(str(message))

    monkeypatch.setattr("workers.master.time.sleep", lambda seconds: None)
    monkeypatch.setattr(master, "announce_stop", announce_stop)
    cause: ClusterError = master.report_cause(cluster, LostError(WORKER, "broken"), "at step 3", exit_code)
    assert announced[-1] == f"75 {cause}" == "75 lost worker 0 at step 3; its log may have the cause"


def test_heartbeat_takes_precedence_over_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise LOST_ROLE

    error = LostError(WORKER, "broken")
    cluster = cluster_with_lost_worker(monkeypatch, error)
    monkeypatch.setattr(master, "announce_stop", lambda *_: None)
    monkeypatch.setattr("workers.master.time.sleep", interrupt)
    assert str(master.report_cause(cluster, error, "at step 3", exit_code)).startswith(
        f"{LOST_ROLE} at step 3"
    )
