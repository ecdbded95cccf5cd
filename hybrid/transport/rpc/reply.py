"""The answer to a call that no future of torch's stands for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Reply(ABC):
    """One that comes while somebody waits for it: a :class:`hybrid.primitives.deferred_response.Watched`.

    Attributes:
        is_done: whether it has come, and been taken.
    """

    __slots__ = ("_callbacks", "_error", "_tensors", "is_done")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []
        self._tensors: Sequence[Tensor] = ()
        self._error: str | None = None
        self.is_done = False

    @abstractmethod
    def _take(self) -> None:
        """Return once it is done."""

    def done(self) -> bool:
        """Whether the answer has come."""
        return self.is_done

    def wait(self) -> Sequence[Tensor]:
        """The answer.

        Raises:
            RuntimeError: in its place came an error, or nothing; :func:`raise_unanswered` reads which.
        """
        if not self.is_done:
            self._take()
        if self._error is not None:
            raise RuntimeError(self._error)
        return self._tensors

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have ``callback`` called with this once the answer is taken."""
        if self.is_done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def complete(self, tensors: Sequence[Tensor], error: str | None = None) -> None:
        """Called with what has come; the first counts."""
        if self.is_done:
            return
        self._tensors, self._error, self.is_done = tensors, error, True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
