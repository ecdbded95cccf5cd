"""Responses that are computed after the called function has returned.

The response to an RPC call is signed for its caller (``hybrid.security``). A deferred response records its
caller when it is created. It signs its value when the value is set.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.futures import Future

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class PendingResult(Protocol[Result_co]):
    """A result in progress, such as a torch future or an RPC call."""

    def wait(self) -> Result_co:
        """Return the result, or raise the exception."""

    def done(self) -> bool:
        """Return whether the call has ended, with a result or an exception."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this object once the result or an exception is known."""


class Caller(Protocol):
    """The receiver of a response."""

    def wrap_result(self, value: Any) -> Any:
        """Return ``value`` in the form that is sent to the caller."""

    def wrap_exception(self, error: Exception) -> Any:
        """Return an exception in the form that is sent to the caller."""


_thread = threading.local()


class serve_caller:  # contextlib.contextmanager would take twice as long
    """A context that sets the caller, or None, of the deferred responses that this thread creates."""

    __slots__ = ("_caller",)

    def __init__(self, caller: Caller | None) -> None:
        self._caller = caller

    def __enter__(self) -> None:
        _thread.caller = self._caller

    def __exit__(self, *_: object) -> None:
        _thread.caller = None


class DeferredResponse(Future[Result]):
    """A future whose value is wrapped for the caller of its context; see :class:`serve_caller`."""

    def __init__(self) -> None:
        super().__init__()
        self._caller: Caller | None = getattr(_thread, "caller", None)

    def set_result(self, result: Result) -> None:
        super().set_result(result if self._caller is None else self._caller.wrap_result(result))

    def set_exception(self, error: Exception) -> None:  # type: ignore[override]  # torch's annotation is wrong
        """Complete the future with an exception, or, if it has a caller, with the wrapped exception."""
        if self._caller is None:
            super().set_exception(error)  # type: ignore[arg-type]
        else:
            super().set_result(self._caller.wrap_exception(error))
