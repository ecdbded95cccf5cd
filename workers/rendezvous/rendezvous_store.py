"""The cluster's key-value store, as torch knows it; in the place of ``TCPStore``, which answers anybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from workers.rendezvous.channel import Channel
from workers.rendezvous.key_values import LATE, STORE


class Store(dist.Store):
    """What torch calls of a store, from Python and C++, in any thread; waits can be interrupted.

    Torch keeps the C++ half only: whoever makes one keeps it as long as torch may use it.

    Args:
        connect: makes a connection to the master.
        timeout_seconds: how long ``get`` and ``wait`` wait, unless they are told.

    Raises:
        DistStoreError: a key did not come in time.
        DistNetworkError: the master went away.
        ClusterError: it is frozen.
    """

    def __init__(self, connect: Callable[[], Channel], timeout_seconds: float) -> None:
        super().__init__()
        self._connect = connect
        self._timeout = timedelta(seconds=timeout_seconds)
        self._idle: list[Channel] = []  # a question that waits does not keep another from being asked

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """The value of ``key``, once it is there."""
        return self._await("get", [key], self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are there."""
        self._await("wait", keys, self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are there."""
        return self._ask("check", *keys) == b"1"

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; the sum."""
        return int(self._ask("add", key, str(amount)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store ``desired`` where the value is ``expected``, or both are nothing; the value then."""
        return self._ask("compare_set", key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._ask("delete_key", key) == b"1"

    deleteKey = delete_key  # the name by which C++ calls it

    def clone(self) -> Store:
        """Itself: threads do not wait for each other."""
        return self

    def _await(self, operation: str, keys: Sequence[str], timeout: timedelta) -> bytes:
        seconds = timeout.total_seconds()
        return self._ask(operation, str(seconds), *keys, seconds=seconds)

    def _ask(self, *question: str | bytes, seconds: float = 0.0) -> bytes:
        parts = [part.encode() if isinstance(part, str) else part for part in question]
        try:
            channel = self._take()
            try:
                channel.send(*parts)
                kind, *answer = channel.receive(seconds)
            except BaseException:
                channel.close()  # the answer may still come, and would be taken for that of another question
                raise
        except OSError as error:
            raise dist.DistNetworkError(str(error)) from error
        self._idle.append(channel)
        if kind == LATE:
            raise dist.DistStoreError(f"{question[0]!r} of {question[2:]!r} waited {seconds:g} s in vain")
        return answer[0]

    def _take(self) -> Channel:
        try:
            return self._idle.pop()
        except IndexError:
            channel = self._connect()
            channel.send(STORE)
            return channel

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
