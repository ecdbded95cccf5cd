"""Calls in progress, and how they fail, on the side that executes a call and on its caller's."""

import re
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from hybrid.errors import ClusterError, HybridError, error_class, error_kind, first_line
from hybrid.primitives.deferred_response import ObservableResult
from hybrid.security.rejected_messages import describe_rejection, parse_exception, parse_rejection
from hybrid.topology import Role
from hybrid.user_code.tracebacks import describe_error, log_traceback, needs_traceback

Result = TypeVar("Result")

_DONE_SECONDS = 1.0
_POLL_SECONDS = 0.02
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


class PendingTensors(Generic[Result]):
    """Tensors that a role will respond with. A step has several of these, so it does little."""

    __slots__ = ("_future", "role")

    def __init__(self, role: Role, future: ObservableResult[Any]) -> None:
        self.role = role
        self._future = future

    def done(self) -> bool:
        """Whether the response is there."""
        return self._future.done()

    def wait(self) -> Result:
        """Return the response; errors as of :func:`raise_unanswered`."""
        try:
            response: Result = self._future.wait()
        except RuntimeError as error:
            raise_unanswered(self.role, error)
        return response

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with the future once the response is there."""
        self._future.add_done_callback(callback)


class Pending(PendingTensors[Result]):
    """A call that may take long: signals are handled while a thread waits for it."""

    def __init__(
        self,
        role: Role,
        future: torch.futures.Future[Any],
        convert: Callable[[Any], Result] = lambda response: response,
    ) -> None:
        super().__init__(role, future)
        self._convert = convert
        self._done = done = threading.Event()
        # The callback must not hold self: through the C++ future that is a cycle that no collector sees.
        future.add_done_callback(lambda _: done.set())

    def done(self, wait_seconds: float = 0.0) -> bool:
        """Whether the response is there; waits up to ``wait_seconds``, during which signals are handled."""
        # If memory has run out, the callback may have failed.
        return self._done.wait(wait_seconds) or super().done()

    def wait(self) -> Result:
        """Return the response.

        Raises:
            RemoteError: the call raised an exception.
            RuntimeError, RejectedCallError, LostError: see :func:`raise_unanswered`.
        """
        while not self.done(_DONE_SECONDS):  # every call has a timeout
            pass
        response = super().wait()
        if isinstance(response, Failure):
            raise RemoteError(self.role, response)
        return self._convert(response)


def gather(calls: Sequence[Pending[Result]], meanwhile: Callable[[], object] = lambda: None) -> list[Result]:
    """Return the responses of calls, in their order, or raise the first failure.

    Args:
        meanwhile: called repeatedly while the calls are in progress.

    Raises:
        RemoteError, RuntimeError, RejectedCallError, LostError: as :meth:`Pending.wait`.
    """
    waiting = list(calls)
    while waiting:
        waiting[0].done(_POLL_SECONDS)
        meanwhile()
        for call in [c for c in waiting if c.done()]:
            call.wait()
            waiting.remove(call)
    return [call.wait() for call in calls]


class Reply:
    """The response to a call that is not sent by RPC.

    Args:
        receive: called by a thread that waits; returns once this is complete.
        poll: receives what has arrived, if the owner can do that.

    Attributes:
        is_done: whether it is complete.
    """

    __slots__ = ("_callbacks", "_error", "_poll", "_receive", "_tensors", "is_done")

    def __init__(self, receive: Callable[["Reply"], None], poll: Callable[[], None] | None = None) -> None:
        self._receive = receive
        self._poll = poll
        self._callbacks: list[Callable[[Any], None]] = []
        self._tensors: Sequence[Tensor] = ()
        self._error: str | None = None
        self.is_done = False

    def done(self) -> bool:
        """Whether the response is there."""
        if not self.is_done and self._poll is not None:
            self._poll()
        return self.is_done

    def wait(self) -> Sequence[Tensor]:
        """Return the tensors.

        Raises:
            RuntimeError: the call has failed; :func:`raise_unanswered` interprets the text.
        """
        if not self.is_done:
            self._receive(self)
        if self._error is not None:
            raise RuntimeError(self._error)
        return self._tensors

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this object once it is complete."""
        if self.is_done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def complete(self, tensors: Sequence[Tensor], error: str | None = None) -> None:
        """Set the tensors or an error; the first call counts."""
        if self.is_done:
            return
        self._tensors, self._error, self.is_done = tensors, error, True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
