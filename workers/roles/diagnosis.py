"""The role that caused a failure, without the failures of other roles that follow from it."""

import copy
import time
from collections.abc import Callable, Iterator

from hybrid import transport
from hybrid.errors import ClusterError
from hybrid.topology import Role
from workers.exit_codes import ExitCode, StopMessage
from workers.rendezvous.bootstrap import Cluster, Member, announce_stop
from workers.rendezvous.interrupt import LostHostError, LostRoleError

_PING_SECONDS = 2.0
# The heartbeat of a lost role ends within this time, and tells whether its host is lost too.
_HEARTBEAT_SECONDS = 1.0


class UnexpectedError(ClusterError):
    """A call to a role failed with an unexpected exception."""

    def __init__(self, error: transport.RemoteError, when: str) -> None:
        super().__init__(f"{error} ({when})")
        self.error = error

    @property
    def kind(self) -> type[Exception]:
        return Exception


def report_cause(
    cluster: Cluster, error: ClusterError, when: str, code_of: Callable[[BaseException], ExitCode]
) -> ClusterError:
    """Diagnose a failure, and report its cause to every role; see :func:`diagnose`.

    Args:
        code_of: returns the exit code of a process that ends with an error.
    """
    try:
        cause = diagnose(cluster, error, when)
        announce_stop(cluster, StopMessage(code_of(cause), str(cause)))
    except LostRoleError as lost:  # the heartbeat of a role has ended meanwhile
        return report_cause(cluster, lost, when, code_of)
    return cause


def diagnose(cluster: Cluster, error: ClusterError, when: str) -> ClusterError:
    """Return the error to show for ``error``: a lost role is the cause, whichever role reported the error.

    Args:
        when: what the run was doing, such as "at step 12".
    """
    if isinstance(error, LostHostError):
        return type(error)(f"{error} {when}")
    if isinstance(error, LostRoleError):
        lost_then = copy.copy(error)
        lost_then.args = (f"{error} {when}; its log may have the cause",)
        return lost_then
    lost = list(_lost_roles(cluster))
    if lost and cluster.rendezvous is not None:
        time.sleep(_HEARTBEAT_SECONDS)  # the interrupt of the heartbeat, meanwhile, says more
    if len(lost) == len(cluster.members) > 1:
        return ClusterError(f"no role responds to the master any more: {error} ({when})")
    if lost:
        names = ", ".join(f"{role} (host {member.host}, pid {member.pid})" for role, member in lost)
        return ClusterError(f"lost {names} {when}; its log may have the cause")
    if not isinstance(error, transport.RemoteError):
        return ClusterError(f"{error} ({when})")
    return error if error.failure.is_users else UnexpectedError(error, when)


def _lost_roles(cluster: Cluster) -> Iterator[tuple[Role, Member]]:
    pings = {role: transport.ping(role, _PING_SECONDS) for role in cluster.members}
    for role, call in pings.items():
        try:
            call.wait()
        except transport.LostError:
            yield role, cluster.members[role]
