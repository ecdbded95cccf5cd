"""The interface of results that another thread or process computes."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result", covariant=True)


class PendingResult(Protocol[Result]):
    """A call whose result may not be available yet, such as an RPC call or a torch future."""

    def wait(self) -> Result:
        """Wait for the end of the call; return its result, or raise its exception."""

    def done(self) -> bool:
        """Return whether the call has ended, with a result or an exception."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this object when the call has ended; at once if it has already ended."""
