"""How a call fails, on its owner's side and on its caller's."""

import re
import socket
from dataclasses import dataclass
from typing import NoReturn

from hybrid.errors import ClusterError, HybridError, error_class, error_kind, first_line
from hybrid.security.rejected_messages import describe_rejection, parse_exception, parse_rejection
from hybrid.topology import Role
from hybrid.user_code.tracebacks import describe_error, log_traceback, needs_traceback

# What TensorPipe and gloo say of a peer that is gone: where in a step that was noticed tells nothing.
_GONE = re.compile(
    r"(connection reset by peer|end of file|broken pipe).*tensorpipe/transport/"
    r"|gloo/transport/.*(connection closed by peer|connection reset by peer|broken pipe)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a call raised on the process where it ran.

    Attributes:
        message: what it says.
        kind: name of its class.
        is_users: whether it says all by itself, wherever it was raised.
        host: where.
        is_logged: whether its stack is in the log of that process.
    """

    message: str
    kind: str
    is_users: bool
    host: str
    is_logged: bool


class RemoteError(ClusterError):
    """A role answered a call with an exception of its own."""

    def __init__(self, role: Role, failure: Failure) -> None:
        where = f"{role} on {failure.host}: "
        super().__init__(failure.message if failure.is_users else where + failure.message)
        self.role = role
        self.failure = failure

    @property
    def kind(self) -> type[Exception]:
        return error_class(self.failure.kind)


class LostError(ClusterError):
    """A role did not answer: it is gone, frozen, or out of reach."""

    def __init__(self, role: Role, cause: str) -> None:
        super().__init__(f"{role} does not answer ({cause})")
        self.role = role


class RefusedError(ClusterError):
    """A call or its answer was refused: it was not signed for its receiver, or holds what may not travel."""

    def __init__(self, role: Role, reason: str) -> None:
        super().__init__(f"a call to {role} failed: {describe_rejection(reason)}")
        self.role = role


def raise_unanswered(role: Role, error: RuntimeError) -> NoReturn:
    """Raise what RPC means by the error that a call to ``role`` has come to.

    Raises:
        RuntimeError: what the answer waited for has failed; :func:`failure_of` makes it readable.
        RefusedError: the role refused the call, or this process its answer.
        LostError: no answer came within the call's timeout, or the connection broke.
    """
    if parse_exception(str(error)):  # it did answer, with an exception
        raise error
    if (reason := parse_rejection(str(error))) is not None:
        raise RefusedError(role, reason) from error
    raise LostError(role, first_line(error)) from error


def failure_of(error: Exception) -> Failure:
    """What a caller is told of an exception; its stack, where it tells more, stays here, in the log."""
    if is_logged := needs_traceback(error) and not _GONE.search(str(error)):
        log_traceback(error)
    kind, is_ours = error_kind(error), isinstance(error, HybridError)
    # Who misses another one may be out of reach itself: it says who it is.
    is_users = is_ours and not isinstance(error, LostError)
    message = str(error) if is_ours else describe_error(error)
    if told := parse_exception(message):  # what went wrong while a worker prepared an answer
        kind, message = told
        if issubclass(error_class(kind), HybridError):
            is_users = True
        else:
            message = f"{kind}: {message}" if message else kind
    return Failure(message, kind, is_users, socket.gethostname(), is_logged)
