"""Which failure came first: one cause named, its echoes left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybrid import errors, wire
from hybrid.errors import ClusterError, HybridError
from hybrid.own_error import is_to_log, words_of
from hybrid.topology import Role
from workers.joining.alarm import EndedRoleError, LostRoleError, StoppedError
from workers.joining.bootstrap import Cluster
from workers.launching.outcome import Cause, Outcome

_POLL_SECONDS = 0.02
_PING_SECONDS = 2.0


class UnexpectedError(ClusterError):
    """A role answered a call with an exception that nobody has thought of."""

    def __init__(self, error: wire.RemoteError, when: str) -> None:
        super().__init__(f"{error} ({when})")
        self.error = error


def gather(calls: Sequence[wire.Pending], meanwhile: Callable[[], object] = lambda: None) -> list[Any]:
    """The answers of calls under way, in their order; the first failure, whichever call has it.

    Args:
        meanwhile: called every now and then.

    Raises:
        RemoteError, LostError: as :meth:`hybrid.wire.Pending.wait`.
    """
    waiting = list(calls)
    while waiting:
        waiting[0].done(_POLL_SECONDS)
        meanwhile()
        for call in [c for c in waiting if c.done()]:
            call.wait()
            waiting.remove(call)
    return [call.wait() for call in calls]


def diagnose(cluster: Cluster, error: ClusterError, when: str) -> ClusterError:
    """The error to show for ``error``: a role that is gone is the cause, whoever complained of it.

    Args:
        when: what the run was doing, such as "at step 12".
    """
    try:
        lost = [] if isinstance(error, LostRoleError) else list(_lost_roles(cluster))
    except LostRoleError as found:  # its signs of life have ended, too
        error, lost = found, []
    if isinstance(error, LostRoleError):
        return type(error)(f"{error} {when}; its log says why, if it could")
    if len(lost) == len(cluster.members) > 1:
        return ClusterError(f"no role answers the master any more: {error} ({when})")
    if lost:
        names = ", ".join(f"{role} (host {member.host}, pid {member.pid})" for role, member in lost)
        return ClusterError(f"lost {names} {when}; its log says why, if it could")
    if not isinstance(error, wire.RemoteError):
        return ClusterError(f"{error} ({when})")
    return error if error.failure.is_users else UnexpectedError(error, when)


def _lost_roles(cluster: Cluster) -> Iterator[tuple[Role, Any]]:
    pings = {role: wire.ping(role, _PING_SECONDS) for role in cluster.members}
    for role, call in pings.items():
        try:
            call.wait()
        except wire.LostError:
            yield role, cluster.members[role]


def describe(role: Role, error: Exception) -> Outcome:
    """What ``role`` tells the launcher of the error that ends it."""
    message = str(error) if isinstance(error, HybridError) else f"{role}: {words_of(error)}"
    return Outcome(" ".join(message.split()), _cause(error), _logged_by(role, error))


def _logged_by(role: Role, error: Exception) -> Role | None:
    """The role whose log has the stack of ``error``, where the line that tells it is not all of it."""
    if isinstance(error, UnexpectedError):
        error = error.error
    if isinstance(error, wire.RemoteError):
        return error.role if error.failure.is_logged else None
    return role if is_to_log(error) else None


def _cause(error: Exception) -> Cause:
    if isinstance(error, StoppedError | EndedRoleError):
        return Cause.ECHO
    kind = type(error)
    if isinstance(error, wire.RemoteError):
        kind = getattr(errors, error.failure.kind, Exception)
    if not issubclass(kind, HybridError) or issubclass(kind, UnexpectedError):
        return Cause.EXCEPTION
    return Cause.LOST if issubclass(kind, ClusterError) else Cause.REFUSED
