"""Which role it was, of a failure that the master has heard of: one cause named, its echoes left out."""

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
# Where a role is lost, its signs of life end too, so soon, and tell whether it was a host, or this one.
_SIGN_SECONDS = 1.0


class UnexpectedError(ClusterError):
    """A role answered a call with an exception that nobody has thought of."""

    def __init__(self, error: transport.RemoteError, when: str) -> None:
        super().__init__(f"{error} ({when})")
        self.error = error

    @property
    def kind(self) -> type[Exception]:
        return Exception


def tell_cause(
    cluster: Cluster, error: ClusterError, when: str, code_of: Callable[[BaseException], ExitCode]
) -> ClusterError:
    """What :func:`diagnose` says, once every role has been told it.

    Args:
        code_of: the exit code of a process that is ended by an error.
    """
    try:
        cause = diagnose(cluster, error, when)
        announce_stop(cluster, StopMessage(code_of(cause), str(cause)))
    except LostRoleError as found:  # its signs of life have ended meanwhile, and the alarm rings once
        return tell_cause(cluster, found, when, code_of)
    return cause


def diagnose(cluster: Cluster, error: ClusterError, when: str) -> ClusterError:
    """The error to show for ``error``: a role that is gone is the cause, whoever complained of it.

    Args:
        when: what the run was doing, such as "at step 12".
    """
    if isinstance(error, LostHostError):
        return type(error)(f"{error} {when}")
    if isinstance(error, LostRoleError):
        lost_then = copy.copy(error)
        lost_then.args = (f"{error} {when}; its log says why, if it could",)
        return lost_then
    lost = list(_lost_roles(cluster))
    if lost and cluster.rendezvous is not None:
        time.sleep(_SIGN_SECONDS)  # the alarm rings meanwhile, and says more
    if len(lost) == len(cluster.members) > 1:
        return ClusterError(f"no role answers the master any more: {error} ({when})")
    if lost:
        names = ", ".join(f"{role} (host {member.host}, pid {member.pid})" for role, member in lost)
        return ClusterError(f"lost {names} {when}; its log says why, if it could")
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
