"""The cluster's key-value store as torch sees it, in place of ``TCPStore``, which authenticates nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from workers.rendezvous.rendezvous_server import LATE, STORE
from workers.rendezvous.secure_channel import Channel


class RendezvousStore(dist.Store):
    """A store for Python and C++, and for any thread; waits can be interrupted.

    Torch keeps only the C++ half, so keep this object as long as torch may use it.

    Args:
        connect: creates a connection to the master.
        timeout_seconds: of ``get`` and ``wait``, unless they are given one.

    Raises:
        DistStoreError: a key did not come in time.
        DistNetworkError: the master went away.
        ClusterError: it is frozen.
    """

    def __init__(self, connect: Callable[[], Channel], timeout_seconds: float) -> None:
        super().__init__()
        self._connect = connect
        self._timeout = timedelta(seconds=timeout_seconds)
        self._idle: list[Channel] = []  # a request that waits does not block another one

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key, value)

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, once it exists."""
        return self._await("get", [key], self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` exist."""
        self._await("wait", keys, self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` exist."""
        return self._request("check", *keys) == b"1"

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return the sum."""
        return int(self._request("add", key, str(amount)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``, or both are empty; return the value afterwards."""
        return self._request("compare_set", key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it existed."""
        return self._request("delete_key", key) == b"1"

    deleteKey = delete_key  # the name that C++ calls

    def clone(self) -> RendezvousStore:
        """Return this object: threads do not wait for each other."""
        return self

    def _await(self, operation: str, keys: Sequence[str], timeout: timedelta) -> bytes:
        seconds = timeout.total_seconds()
        return self._request(operation, str(seconds), *keys, seconds=seconds)

    def _request(self, *request: str | bytes, seconds: float = 0.0) -> bytes:
        fields = [field.encode() if isinstance(field, str) else field for field in request]
        try:
            if self._idle:
                channel = self._idle.pop()
            else:
                channel = self._connect()
                channel.send(STORE)
            try:
                channel.send(*fields)
                kind, *response = channel.receive(seconds)
            except BaseException:
                channel.close()  # the response may still come, and would be taken for that of another request
                raise
        except OSError as error:
            raise dist.DistNetworkError(str(error)) from error
        self._idle.append(channel)
        if kind == LATE:
            raise dist.DistStoreError(f"{request[0]!r} of {request[2:]!r} timed out after {seconds:g} s")
        return response[0]

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
