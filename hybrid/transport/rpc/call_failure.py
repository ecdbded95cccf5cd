"""How a call fails, on the side that executes it and on its caller's."""

import re
import socket
from dataclasses import dataclass
from typing import NoReturn

from hybrid.errors import ClusterError, HybridError, error_class, error_kind, first_line
from hybrid.security.rejected_messages import describe_rejection, parse_exception, parse_rejection
from hybrid.topology import Role
from hybrid.user_code.tracebacks import describe_error, log_traceback, needs_traceback

# How TensorPipe and gloo report a peer that is gone; the stack adds nothing then.
_GONE = re.compile(
    r"(connection reset by peer|end of file|broken pipe).*tensorpipe/transport/"
    r"|gloo/transport/.*(connection closed by peer|connection reset by peer|broken pipe)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a call raised on the process that executed it.

    Attributes:
        kind: name of its class.
        is_users: whether the message is complete without role and host.
        is_logged: whether its stack is in the log of that process.
    """

    message: str
    kind: str
    is_users: bool
    host: str
    is_logged: bool


class RemoteError(ClusterError):
    """A call raised an exception on another role."""

    def __init__(self, role: Role, failure: Failure) -> None:
        where = "" if failure.is_users else f"{role} on {failure.host}: "
        super().__init__(where + failure.message)
        self.role = role
        self.failure = failure

    @property
    def kind(self) -> type[Exception]:
        return error_class(self.failure.kind)


class LostError(ClusterError):
    """A role did not respond: it is gone, frozen, or out of reach."""

    def __init__(self, role: Role, cause: str) -> None:
        super().__init__(f"{role} does not answer ({cause})")
        self.role = role


class RejectedCallError(ClusterError):
    """A call or its response was rejected."""

    def __init__(self, role: Role, reason: str) -> None:
        super().__init__(f"a call to {role} failed: {describe_rejection(reason)}")
        self.role = role


def raise_unanswered(role: Role, error: RuntimeError) -> NoReturn:
    """Raise the error that RPC's or a socket's error in a call to ``role`` stands for.

    Raises:
        RuntimeError: the call has failed; :func:`failure_of` reads its text.
        RejectedCallError: the role rejected the call, or this process its response.
        LostError: no response came within the timeout, or the connection broke.
    """
    if parse_exception(str(error)):
        raise error
    if (reason := parse_rejection(str(error))) is not None:
        raise RejectedCallError(role, reason) from error
    raise LostError(role, first_line(error)) from error


def failure_of(error: Exception) -> Failure:
    """Return what a caller learns of an exception; its stack is logged here, if it helps."""
    if is_logged := needs_traceback(error) and not _GONE.search(str(error)):
        log_traceback(error)
    kind, is_ours = error_kind(error), isinstance(error, HybridError)
    # A process that misses another one may be out of reach itself, so its message names it.
    is_users = is_ours and not isinstance(error, LostError)
    message = str(error) if is_ours else describe_error(error)
    if parsed := parse_exception(message):  # raised while a worker prepared a response
        kind, message = parsed
        if issubclass(error_class(kind), HybridError):
            is_users = True
        else:
            message = f"{kind}: {message}" if message else kind
    return Failure(message, kind, is_users, socket.gethostname(), is_logged)
