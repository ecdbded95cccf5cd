"""What is said of a failure, however it is heard of."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybrid.errors import ClusterError
from hybrid.topology import Role, RoleKind
from hybrid.wire import LostError
from workers.joining.alarm import LostRoleError
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

    def announce_stop(cluster: object, reason: str) -> None:
        ring("announce_stop")
        told.append(reason)

    monkeypatch.setattr(diagnosis, "_lost_roles", lost_roles)
    monkeypatch.setattr(diagnosis, "announce_stop", announce_stop)
    error = LostError(Role(RoleKind.WORKER, 0), "broken")
    cluster = cast(Any, SimpleNamespace(members={}))
    cause: ClusterError = diagnosis.tell_cause(cluster, error, "at step 3")
    assert told == [str(cause)] == ["lost worker 0 at step 3; its log says why, if it could"]
