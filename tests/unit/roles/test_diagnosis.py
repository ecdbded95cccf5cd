"""What is said of a failure, however it is heard of."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybrid.errors import ClusterError
from hybrid.topology import Role, RoleKind
from hybrid.transport import LostError
from workers.exit_codes import StopMessage, exit_code
from workers.rendezvous.interrupt import LostHostError, LostRoleError
from workers.roles import diagnosis


@pytest.mark.parametrize("rings_in", ["diagnose", "announce_stop"])
def test_an_alarm_that_rings_while_the_cause_is_told_says_what_was_going_on(
    rings_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one role that is gone, its connection and its signs of life tell within moments of each other."""
    told: list[str] = []
    rings = iter([LostRoleError("lost worker 0")])

    def ring(where: str) -> None:
        if where == rings_in and (error := next(rings, None)):
            raise error

    def lost_roles(cluster: object) -> list[Any]:
        ring("diagnose")
        return []

    def announce_stop(cluster: object, word: StopMessage) -> None:
        ring("announce_stop")
        told.append(str(word))

    monkeypatch.setattr(diagnosis, "_lost_roles", lost_roles)
    monkeypatch.setattr(diagnosis, "announce_stop", announce_stop)
    error = LostError(Role(RoleKind.WORKER, 0), "broken")
    cluster = cast(Any, SimpleNamespace(members={}))
    cause: ClusterError = diagnosis.report_cause(cluster, error, "at step 3", exit_code)
    assert told == [f"75 {cause}"] == ["75 lost worker 0 at step 3; its log may have the cause"]


ELSEWHERE = LostHostError("lost host b (trainer 1, worker 0)")


def test_a_host_that_is_lost_has_no_log() -> None:
    cluster = cast(Any, SimpleNamespace(members={}))
    cause = diagnosis.diagnose(cluster, ELSEWHERE, "at step 3")
    assert str(cause) == "lost host b (trainer 1, worker 0) at step 3"


def test_signs_of_life_have_time_to_tell_more_than_a_broken_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They name the host, or say that the master was stopped; a connection only blames its other end."""

    def ring(seconds: float) -> None:
        raise ELSEWHERE

    worker = Role(RoleKind.WORKER, 0)
    monkeypatch.setattr(diagnosis, "_lost_roles", lambda _: [(worker, SimpleNamespace(host="b", pid=7))])
    monkeypatch.setattr(diagnosis, "announce_stop", lambda *_: None)
    monkeypatch.setattr("workers.roles.diagnosis.time.sleep", ring)
    cluster = cast(Any, SimpleNamespace(members={}, rendezvous=object()))
    cause = diagnosis.report_cause(cluster, LostError(worker, "broken"), "at step 3", exit_code)
    assert str(cause) == f"{ELSEWHERE} at step 3"
