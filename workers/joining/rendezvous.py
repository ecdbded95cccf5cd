"""The master's side of the rendezvous: lets in who has the secret, keeps what roles store, hears them live.

One thread with an event loop serves all connections, so a wait for a key costs nothing while it lasts. Free
of torch.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from hybrid.errors import ClusterError, first_line
from hybrid.secret import Secret
from workers.joining.alarm import LostRoleError
from workers.joining.channel import ChannelError, MasterChannel, welcome
from workers.joining.heartbeat import LIFE, TAKEN, Watch
from workers.joining.keys import Keys
from workers.joining.rhythm import Rhythm

STOP, VERDICT = "stop", "verdict"  # the keys under which roles wait for the master's word
TWICE = "twice"  # the keys of roles that were claimed more than once: twice/ROLE

_HANDSHAKE_SECONDS = 5.0
_MOST_STRANGERS = 64
_BACKLOG = 128
_BUFFER_BYTES = 4096
_LINE_EVERY_SECONDS = 10.0
_END_SECONDS = 5.0
# The main thread knows what the run was doing when a role was lost, so it is heard first.
_GRACE_SECONDS = 1.0


class Rendezvous:
    """Serves the rendezvous of a cluster for the length of a ``with`` block.

    Args:
        listener: a listening socket, which is closed at the end.
        rhythm: of the roles' signs of life.
        ring: called with the error of a role that is lost.
    """

    def __init__(
        self, listener: socket.socket, secret: Secret, rhythm: Rhythm, ring: Callable[[ClusterError], None]
    ) -> None:
        self._listener = listener
        self._ring = ring
        self._door = _Door(secret)
        self._keys = Keys()
        self._watch = Watch(rhythm, self._lost)
        self._claimed: set[str] = set()
        self._failure = ""
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    def __enter__(self) -> Rendezvous:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call_soon(self._closing.set)
        self._thread.join(_END_SECONDS)

    def stop(self, reason: str, wait_seconds: float) -> None:
        """Tell every role that the run has failed, and give them time to leave; the first reason counts."""
        self._call_soon(self._stop, reason)
        self.await_left(wait_seconds)

    def await_left(self, timeout_seconds: float) -> None:
        """Wait until every role has left; one that is lost has."""
        left = threading.Event()
        self._call_soon(self._watch.when_all_left, left.set)
        left.wait(timeout_seconds)

    def _call_soon(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop has ended before its time, and its error is on the way
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:  # raised in the main thread
            self._ring(ClusterError(f"the rendezvous has failed: {first_line(error)}"))

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accept, sock=self._listener, backlog=_BACKLOG, limit=_BUFFER_BYTES
        )
        counting = asyncio.create_task(self._watch.count())
        await self._closing.wait()
        counting.cancel()
        server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await self._door.let_in(reader, writer)
            if channel is not None:
                await self._attend(channel)
        except asyncio.CancelledError:
            pass  # the rendezvous is over; asyncio of Python 3.11 would print a stack
        finally:
            writer.close()

    async def _attend(self, channel: MasterChannel) -> None:
        try:
            purpose, *about = await channel.receive()
            if purpose == LIFE:
                name, host, pid = (part.decode() for part in about)
                if name in self._claimed:
                    self._keys.set(f"{TWICE}/{name}", b"")
                    await channel.send(*TAKEN)
                    return
                self._claimed.add(name)
                await self._watch.attend(channel, f"{name} (host {host}, pid {pid})", lambda: self._failure)
            else:
                await self._keys.serve(channel)
        except (OSError, EOFError):
            return  # a role that closes this connection may go on; its signs of life tell

    def _lost(self, error: LostRoleError) -> None:
        if not self._failure:  # else the main thread is on its way out, with the error that came first
            self._ring(error)
        self._loop.call_later(_GRACE_SECONDS, self._stop, str(error))

    def _stop(self, reason: str) -> None:
        self._failure = self._failure or reason
        for key in (VERDICT, STOP):
            if not self._keys.has([key]):
                self._keys.set(key, self._failure.encode())


class _Door:
    """Lets in who has the secret. Strangers get little time and memory, and few of them are here at once."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # in the order in which they came
        self._refused = 0
        self._next_line_at = 0.0

    async def let_in(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> MasterChannel | None:
        """The connection, once its other side has proved the secret; None where it has not."""
        self._strangers[writer] = None
        if len(self._strangers) > _MOST_STRANGERS:
            # The oldest goes, not the newest: one who has the secret needs no time to prove it.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                return await welcome(reader, writer, self._secret)
        except ChannelError as error:
            self._note(writer, str(error))
        except (OSError, EOFError):
            self._note(writer, "no proof of the secret")
        finally:
            self._strangers.pop(writer, None)
        return None

    def _note(self, writer: asyncio.StreamWriter, reason: str) -> None:
        """Say that somebody was refused, in a line every so often."""
        self._refused += 1
        if time.monotonic() < self._next_line_at:
            return
        self._next_line_at = time.monotonic() + _LINE_EVERY_SECONDS
        peer = (writer.get_extra_info("peername") or ["?"])[0]
        print(f"rendezvous: {self._refused} refused so far, the last from {peer}: {reason}", file=sys.stderr)
