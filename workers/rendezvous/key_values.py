"""What roles store at the rendezvous, as the master keeps it. Free of torch."""

import asyncio
from collections.abc import Sequence

from workers.rendezvous.channel import ChannelError, MasterChannel

STORE = b"store"  # what the connection is for
LATE = b"late"
_DONE = b"done"


class Keys:
    """Keys and values that all roles see; belongs to an event loop.

    What can be asked is what torch's own stores do::

        set key value                      check key ..              -> 1 where all are there
        get seconds key      -> value      add key amount            -> sum
        wait seconds key ..                compare_set key old new   -> the value then
        delete_key key       -> 1 where it was there

    The answer to ``get`` and ``wait`` comes once every key is there, or is "late".
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def has(self, names: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return all(name in self._values for name in names)

    def set(self, key: str, value: bytes) -> None:
        """Store a value, and wake up who waits for one."""
        self._values[key] = value
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, channel: MasterChannel) -> None:
        """Answer a role's questions until it closes the connection; OSError or EOFError then."""
        while True:
            operation, *arguments = await channel.receive()
            try:
                answer = await self._answer(operation.decode(), arguments)
            except TimeoutError:
                await channel.send(LATE)
            else:
                await channel.send(_DONE, answer)

    async def _answer(self, operation: str, arguments: list[bytes]) -> bytes:
        if operation in ("get", "wait"):
            seconds, *names = (argument.decode() for argument in arguments)
            async with asyncio.timeout(float(seconds)):
                while not self.has(names):
                    await self._changed.wait()
            return self._values[names[0]] if operation == "get" else b""
        if operation == "check":
            return b"%d" % self.has([argument.decode() for argument in arguments])
        return self._change(operation, arguments[0].decode(), arguments[1:])

    def _change(self, operation: str, key: str, arguments: list[bytes]) -> bytes:
        if operation == "set":
            self.set(key, arguments[0])
            return b""
        if operation == "add":
            self.set(key, b"%d" % (int(self._values.get(key, b"0")) + int(arguments[0])))
            return self._values[key]
        if operation == "compare_set":
            old, new = arguments
            if self._values.get(key, b"") == old:
                self.set(key, new)
            return self._values.get(key, old)
        if operation == "delete_key":
            return b"%d" % (self._values.pop(key, None) is not None)
        raise ChannelError(f"no such operation: {operation}")
