"""The master's side of the rendezvous: lets in who has the secret, keeps what roles store, hears them live.

One thread with an event loop serves all connections, so a wait for a key costs nothing while it lasts. Free
of torch.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

from hybrid.errors import ClusterError, first_line
from hybrid.security.secret import Secret
from workers.exit_codes import Word, exit_code
from workers.rendezvous.channel import ChannelError, MasterChannel, Seal, welcome
from workers.rendezvous.heartbeat import Watch
from workers.rendezvous.heartbeat_interval import Rhythm
from workers.rendezvous.interrupt import LostRoleError
from workers.rendezvous.key_values import Keys
from workers.rendezvous.membership import Presence
from workers.rendezvous.registration import LIFE, OVER, REFUSED, TAKEN, WELCOME, Admission, Claim

STOP, VERDICT = "stop", "verdict"  # the keys under which roles wait for the master's word
TWICE = "twice"  # the keys of roles that were claimed more than once: twice/ROLE

_LOG = logging.getLogger(__name__)
_HANDSHAKE_SECONDS = 5.0
# As many as come within a tenth of a second at most: so long has one who has the secret to prove it.
_MOST_STRANGERS = 512
_BUFFER_BYTES = 4096
_SECONDS_WITHOUT_DESCRIPTORS = 0.1
_LINE_EVERY_SECONDS = 10.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.05
# The main thread knows what the run was doing when a role was lost, so it is heard first.
_GRACE_SECONDS = 1.0


class Rendezvous:
    """Serves the rendezvous of a cluster for the length of a ``with`` block.

    Args:
        listener: a listening socket, which is closed at the end.
        admission: answers the roles' claims.
        rhythm: of their signs of life.
        ring: called with the error of a role that is lost.
        asked: called with the number of the signal by which a role was asked to stop.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        admission: Admission,
        rhythm: Rhythm,
        ring: Callable[[ClusterError], None],
        asked: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._listener = listener
        self._admission = admission
        self._ring = ring
        self._door = _Door(secret)
        self._keys = Keys()
        self._watch = Watch(rhythm, self._lost, asked)
        self._claimed: set[str] = set()
        self._failure = b""
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    def __enter__(self) -> Rendezvous:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call_soon(self._closing.set)
        self._thread.join(_END_SECONDS)

    def stop(self, word: Word, wait_seconds: float) -> None:
        """Tell every role that the run has failed, and give them time to leave; the first word counts."""
        self._call_soon(self._stop, word)
        self.await_left(wait_seconds)

    def await_claims(self, timeout_seconds: float) -> None:
        """Wait until every role of the cluster has come."""
        topology = self._admission.topology
        names = {str(role) for role in (*topology.trainers, *topology.workers)}
        deadline = time.monotonic() + timeout_seconds
        while not self._claimed.issuperset(names) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

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
        background = [asyncio.create_task(each) for each in (self._watch.count(), self._accept_all())]
        closing = asyncio.create_task(self._closing.wait())
        ended, _ = await asyncio.wait([*background, closing], return_when=asyncio.FIRST_COMPLETED)
        self._listener.close()
        for task in ended - {closing}:
            task.result()  # an error: they have no end

    async def _accept_all(self) -> None:
        """Accept one connection after the other.

        Not all that wait at once, as a server of asyncio does: in a crowd, each gets its turn to be heard
        before the next ones push it out.
        """
        self._listener.setblocking(False)
        visits: set[asyncio.Task[None]] = set()
        while True:
            try:
                connection, (address, *_) = await self._loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    raise
                await asyncio.sleep(_SECONDS_WITHOUT_DESCRIPTORS)
                continue
            visits.add(visit := self._loop.create_task(self._receive(connection, address)))
            visit.add_done_callback(visits.discard)

    async def _receive(self, connection: socket.socket, address: str) -> None:
        seal, is_here = None, connection.getsockname()[0] == address
        try:
            seal = await self._door.let_in(connection, address)
        finally:
            if seal is None:
                connection.close()
        if seal is not None:
            with self._watch.arrival() as arrived:
                reader, writer = await asyncio.open_connection(sock=connection, limit=_BUFFER_BYTES)
                try:
                    await self._attend(MasterChannel(reader, writer, seal), arrived, address, is_here)
                finally:
                    writer.close()

    async def _attend(
        self, channel: MasterChannel, arrived: Callable[[], None], address: str, is_here: bool
    ) -> None:
        try:
            purpose, *about = await channel.receive()
            arrived()
            if purpose == LIFE:
                await self._answer(channel, Claim.unpacked(about[0]), address, is_here)
            else:
                await self._keys.serve(channel)
        except (OSError, EOFError):
            return  # a role that closes this connection may go on; its signs of life tell

    async def _answer(self, channel: MasterChannel, claim: Claim, address: str, is_here: bool) -> None:
        if claim.role in self._claimed:  # whatever else is wrong with this one, the cluster goes on
            self._keys.set(f"{TWICE}/{claim.role}", b"")
            await channel.send(TAKEN)
            return
        if (why := self._admission.refusal(claim)) is not None:
            await channel.send(REFUSED, why.encode())
            return
        self._claimed.add(claim.role)
        if self._admission.over:
            await channel.send(OVER, self._admission.over.encode())
            return
        welcome = WELCOME, self._admission.welcome.packed()
        who = Presence(claim.role, claim.host, claim.pid, address, is_here)
        await self._watch.attend(channel, who, welcome, lambda: self._failure)

    def _lost(self, error: LostRoleError) -> None:
        if not self._failure:  # else the main thread is on its way out, with the error that came first
            self._ring(error)
        self._loop.call_later(_GRACE_SECONDS, self._stop, Word(exit_code(error), str(error)))

    def _stop(self, word: Word) -> None:
        self._failure = self._failure or str(word).encode()
        for key in (VERDICT, STOP):
            if not self._keys.has([key]):
                self._keys.set(key, self._failure)


class _Door:
    """Lets in who has the secret. Strangers get little time and memory, and few of them are here at once."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        # By their addresses, and in the order in which they came.
        self._strangers: defaultdict[str, dict[asyncio.Task[object], None]] = defaultdict(dict)
        self._refused = 0
        self._next_line_at = 0.0

    async def let_in(self, connection: socket.socket, address: str) -> Seal | None:
        """How to speak with who has connected, once it has proved the secret; None where it has not."""
        visit = asyncio.current_task()
        assert visit is not None, "a visit is a task"
        self._strangers[address][visit] = None
        self._make_room()
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                return await welcome(connection, self._secret)
        except ChannelError as error:
            self._note(address, str(error))
        except (OSError, EOFError):
            self._note(address, "no proof of the secret")
        finally:
            self._strangers[address].pop(visit, None)
            if not self._strangers[address]:
                del self._strangers[address]
        return None

    def _make_room(self) -> None:
        """Send one away where there are too many.

        It is one of the most crowded address, since others are not to suffer from a crowd, and the oldest:
        who has the secret needs little time to prove it.
        """
        if sum(map(len, self._strangers.values())) > _MOST_STRANGERS:
            crowd = max(self._strangers.values(), key=lambda visits: len(visits))
            oldest = next(iter(crowd))
            del crowd[oldest]
            oldest.cancel()

    def _note(self, address: str, reason: str) -> None:
        """Say that somebody was refused, in a line every so often."""
        self._refused += 1
        if time.monotonic() < self._next_line_at:
            return
        self._next_line_at = time.monotonic() + _LINE_EVERY_SECONDS
        _LOG.warning("%d connections refused, the last from %s: %s", self._refused, address, reason)
