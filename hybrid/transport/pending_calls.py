"""Calls in progress, failures as the called process returns them, and errors that the caller raises."""

import re
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from hybrid.errors import ClusterError, HybridError, error_class, error_kind, first_line, parse_exception
from hybrid.primitives.pending_result import PendingResult
from hybrid.security.rejections import describe_rejection, parse_rejection
from hybrid.topology import Role
from hybrid.user_code.user_modules import describe_error, log_traceback, needs_traceback

Result = TypeVar("Result")

_DONE_SECONDS = 1.0
_POLL_SECONDS = 0.02
# Messages of TensorPipe and gloo about a peer that has ended. A traceback adds nothing to them.
_PEER_ENDED = re.compile(
    r"(connection reset by peer|end of file|broken pipe).*tensorpipe/transport/"
    r"|gloo/transport/.*(connection closed by peer|connection reset by peer|broken pipe)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a call raised, as the called process returns it to the caller."""

    message: str
    kind: str  # name of the exception's class, from error_kind
    is_self_contained: bool  # whether the message is complete without role and host
    host: str
    is_logged: bool  # whether the traceback is in the log of the called process


class RemoteError(ClusterError):
    """A call raised an exception on another role."""

    def __init__(self, role: Role, failure: Failure) -> None:
        where = "" if failure.is_self_contained else f"{role} on {failure.host}: "
        super().__init__(where + failure.message)
        self.role = role
        self.failure = failure

    @property
    def kind(self) -> type[Exception]:
        """The :attr:`HybridError.kind` of the exception; Exception for a class outside ``hybrid.errors``."""
        return error_class(self.failure.kind)


class LostError(ClusterError):
    """A role did not respond: it has ended, is frozen, or cannot be reached."""

    def __init__(self, role: Role, cause: str) -> None:
        super().__init__(f"{role} does not respond ({cause})")
        self.role = role


def make_failure(error: Exception) -> Failure:
    """Return ``error`` as a value for the caller; log the traceback unless the message explains the error."""
    is_logged = needs_traceback(error) and not _PEER_ENDED.search(first_line(error))
    if is_logged:
        log_traceback(error)
    kind = error_kind(error)
    is_project_error = isinstance(error, HybridError)
    # A process that lost another one may be unreachable itself, so the message must name this process, too.
    is_self_contained = is_project_error and not isinstance(error, LostError)
    message = str(error) if is_project_error else describe_error(error)
    parsed = parse_exception(message)
    if parsed:  # another role has raised it
        kind, message = parsed
        if issubclass(error_class(kind), HybridError):
            is_self_contained = True
        else:
            message = f"{kind}: {message}" if message else kind
    return Failure(message, kind, is_self_contained, socket.gethostname(), is_logged)


class PendingTensors(Generic[Result]):
    """A call in progress that returns tensors. The class is kept small: a step creates many objects."""

    __slots__ = ("_future", "role")

    def __init__(self, role: Role, future: PendingResult[Any]) -> None:
        self.role = role
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Result:
        """Return the response.

        Raises:
            RuntimeError: the call raised an exception; :func:`parse_exception` returns its class and message.
            ClusterError: the role rejected the call, or this process rejected the response.
            LostError: no response came within the timeout, or the connection broke.
        """
        try:
            response: Result = self._future.wait()
        except RuntimeError as error:
            if parse_exception(str(error)):
                raise
            if (reason := parse_rejection(str(error))) is None:
                raise LostError(self.role, first_line(error)) from error
            raise ClusterError(f"a call to {self.role} failed: {describe_rejection(reason)}") from error
        return response

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._future.add_done_callback(callback)


class Pending(PendingTensors[Result]):
    """A call in progress that may take long. While the main thread waits, it handles signals."""

    def __init__(
        self,
        role: Role,
        future: torch.futures.Future[Any],
        convert: Callable[[Any], Result] = lambda response: response,
    ) -> None:
        super().__init__(role, future)
        self._convert = convert
        self._done = done = threading.Event()
        # The callback must not refer to self: a reference cycle through the C++ future is never freed.
        future.add_done_callback(lambda _: done.set())

    def done(self, wait_seconds: float = 0.0) -> bool:
        """Wait up to ``wait_seconds`` for the response; return whether it has arrived."""
        # If memory has run out, the callback may have failed.
        return self._done.wait(wait_seconds) or super().done()

    def wait(self) -> Result:
        """Return the result. RemoteError if the call raised; other errors are as in PendingTensors.wait."""
        while not self.done(_DONE_SECONDS):  # every call has a timeout
            pass
        response = super().wait()
        if isinstance(response, Failure):
            raise RemoteError(self.role, response)
        return self._convert(response)


def gather(calls: Sequence[Pending[Result]], meanwhile: Callable[[], object] = lambda: None) -> list[Result]:
    """Return the results of :meth:`Pending.wait` in the order of ``calls``; raise an error once a call fails.

    ``meanwhile`` is called repeatedly while calls are in progress; it may raise an exception to end the wait.
    """
    waiting = list(calls)
    while waiting:
        waiting[0].done(_POLL_SECONDS)
        meanwhile()
        for call in [c for c in waiting if c.done()]:
            call.wait()
            waiting.remove(call)
    return [call.wait() for call in calls]
