"""Calls under way."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from hybrid.primitives.deferred_response import Watched
from hybrid.topology import Role
from hybrid.transport.rpc.call_failure import Failure, RemoteError, raise_unanswered

Result = TypeVar("Result")

_DONE_SECONDS = 1.0
_POLL_SECONDS = 0.02


class PendingTensors(Generic[Result]):
    """Tensors that a role is to answer with. There are several of these in a step, so it does little."""

    __slots__ = ("_future", "role")

    def __init__(self, role: Role, future: Watched[Any]) -> None:
        self.role = role
        self._future = future

    def done(self) -> bool:
        """Whether the answer has come."""
        return self._future.done()

    def wait(self) -> Result:
        """The answer; for what it raises, see :func:`raise_unanswered`."""
        try:
            answer: Result = self._future.wait()
        except RuntimeError as error:
            raise_unanswered(self.role, error)
        return answer

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have ``callback`` called with the future once the answer is there."""
        self._future.add_done_callback(callback)


class Pending(PendingTensors[Result]):
    """A call that may take long: signals come through while it is waited for."""

    def __init__(
        self,
        role: Role,
        future: torch.futures.Future[Any],
        convert: Callable[[Any], Result] = lambda answer: answer,
    ) -> None:
        super().__init__(role, future)
        self._convert = convert
        self._done = done = threading.Event()
        # The callback must not hold self: through the C++ future that is a cycle no collector sees.
        future.add_done_callback(lambda _: done.set())

    def done(self, wait_seconds: float = 0.0) -> bool:
        """Whether the answer has come; waits up to ``wait_seconds`` for it, open to signals."""
        # Where memory has run out, the callback may have failed.
        return self._done.wait(wait_seconds) or super().done()

    def wait(self) -> Result:
        """The answer.

        Raises:
            RemoteError: the call raised an exception.
            RuntimeError, RefusedError, LostError: see :func:`raise_unanswered`.
        """
        while not self.done(_DONE_SECONDS):  # every call has a timeout
            pass
        answer = super().wait()
        if isinstance(answer, Failure):
            raise RemoteError(self.role, answer)
        return self._convert(answer)


def gather(calls: Sequence[Pending[Result]], meanwhile: Callable[[], object] = lambda: None) -> list[Result]:
    """The answers of calls under way, in their order; the first failure, whichever call has it.

    Args:
        meanwhile: called every now and then.

    Raises:
        RemoteError, RuntimeError, RefusedError, LostError: as :meth:`Pending.wait`.
    """
    waiting = list(calls)
    while waiting:
        waiting[0].done(_POLL_SECONDS)
        meanwhile()
        for call in [c for c in waiting if c.done()]:
            call.wait()
            waiting.remove(call)
    return [call.wait() for call in calls]
