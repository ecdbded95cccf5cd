"""Which failure came first: one cause named, its echoes left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybrid import wire
from hybrid.errors import ClusterError
from hybrid.topology import Role
from workers.bootstrap import Cluster

_POLL_SECONDS = 0.02
_PING_SECONDS = 2.0


def gather(calls: Sequence[wire.Pending]) -> list[Any]:
    """The answers of calls under way, in their order; the first failure, whichever call has it.

    Raises:
        RemoteError, LostError: as :meth:`hybrid.wire.Pending.wait`.
    """
    waiting = list(calls)
    while waiting:
        waiting[0].done(_POLL_SECONDS)
        for call in [c for c in waiting if c.done()]:
            call.wait()
            waiting.remove(call)
    return [call.wait() for call in calls]


def diagnose(cluster: Cluster, error: ClusterError, when: str) -> ClusterError:
    """The error to show for ``error``: a role that is gone is the cause, whoever complained of it.

    Args:
        when: what the run was doing, such as "at step 12".
    """
    lost = list(_lost_roles(cluster))
    if lost:
        names = ", ".join(f"{role} (host {member.host}, pid {member.pid})" for role, member in lost)
        return ClusterError(f"lost {names} {when}; its log says why, if it could")
    if isinstance(error, wire.RemoteError) and error.failure.is_users:
        return error
    return ClusterError(f"{error} ({when})")


def _lost_roles(cluster: Cluster) -> Iterator[tuple[Role, Any]]:
    pings = {role: wire.ping(role, _PING_SECONDS) for role in cluster.members}
    for role, call in pings.items():
        try:
            call.wait()
        except wire.LostError:
            yield role, cluster.members[role]
