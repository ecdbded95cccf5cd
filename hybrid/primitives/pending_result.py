"""The interface of a result in progress."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result", covariant=True)


class PendingResult(Protocol[Result]):
    """A result in progress, such as a torch future or an RPC call."""

    def wait(self) -> Result:
        """Return the result, or raise the exception."""

    def done(self) -> bool:
        """Return whether the call has ended, with a result or an exception."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this object once the result or an exception is known."""
