"""What a call returns that is answered later.

A call by RPC is answered for its caller alone (``security``). What it returns at once is addressed where
it returns; a future knows its caller from the moment at which it is made, and addresses its own value: one
more callback on every answer would cost more than the signature.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.futures import Future

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Awaited(Protocol[Result_co]):
    """An answer on its way, as who waits for it knows it: a future of torch's, a call by RPC, a lookup."""

    def wait(self) -> Result_co:
        """The answer, or the exception that came in its place."""
        ...


class Watched(Awaited[Result_co], Protocol[Result_co]):
    """One that says when it is there."""

    def done(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...


class Caller(Protocol):
    """Who waits for an answer."""

    def answered(self, value: Any) -> Any:
        """``value``, for the caller."""
        ...

    def failed(self, error: Exception) -> Any:
        """What tells the caller that there is no answer, since an exception was raised instead."""
        ...


_serving = threading.local()


class serving:  # as a generator it would cost twice as much
    """While it is entered, answers that this thread makes are for this caller, or for none."""

    __slots__ = ("_caller",)

    def __init__(self, caller: Caller | None) -> None:
        self._caller = caller

    def __enter__(self) -> None:
        _serving.caller = self._caller

    def __exit__(self, *_: object) -> None:
        _serving.caller = None


class Answer(Future[Result]):
    """A future that whoever makes it completes; for the caller that is being served, if one is."""

    def __init__(self) -> None:
        super().__init__()
        self._caller: Caller | None = getattr(_serving, "caller", None)

    def set_result(self, result: Result) -> None:
        """Complete it."""
        super().set_result(result if self._caller is None else self._caller.answered(result))

    def set_exception(self, error: Exception) -> None:  # type: ignore[override]  # torch's annotation is wrong
        """Complete it with an exception, which RPC would send as a value."""
        if self._caller is None:
            super().set_exception(error)  # type: ignore[arg-type]
        else:
            super().set_result(self._caller.failed(error))
