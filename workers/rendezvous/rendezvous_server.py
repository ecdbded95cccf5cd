"""The master's rendezvous server: authenticates roles, stores their keys and monitors their heartbeats.

One thread with an event loop serves all connections, so a role that waits for a key costs nothing. Free of
torch.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

from hybrid.config import RunConfig
from hybrid.errors import ClusterError, first_line
from hybrid.security.secret import Secret
from workers.exit_codes import StopMessage, exit_code
from workers.rendezvous.heartbeat import (
    ACCEPTED,
    HEARTBEATS,
    REJECTED,
    RUN_ENDED,
    TAKEN,
    Acceptance,
    ConnectedRole,
    HeartbeatInterval,
    HeartbeatMonitor,
    Registration,
    RegistrationPolicy,
)
from workers.rendezvous.interrupt import LostRoleError
from workers.rendezvous.master_address import DEFAULT_PORT, listen
from workers.rendezvous.secure_channel import ChannelError, FrameCipher, MasterChannel, authenticate

STOP, VERDICT = "stop", "verdict"  # keys under which roles wait for the master's decision
TWICE = "twice"  # prefix of the keys of roles that registered more than once
STORE = b"store"  # purpose of a connection that reads and writes keys
LATE = b"late"
_DONE = b"done"

_LOG = logging.getLogger(__name__)
HANDSHAKE_SECONDS = 5.0
# As many as connect within a tenth of a second at most: a role needs no more time for the handshake.
MAX_UNAUTHENTICATED = 512
_BUFFER_BYTES = 4096
_SECONDS_WITHOUT_DESCRIPTORS = 0.1
_LINE_EVERY_SECONDS = 10.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.05
# The main thread knows what the run was doing when a role was lost, so its message comes first.
_GRACE_SECONDS = 1.0


class RendezvousServer:
    """Serves the rendezvous of a cluster for the length of a ``with`` block.

    Args:
        listener: a listening socket, which is closed at the end.
        policy: decides about registrations.
        interval: of heartbeats.
        on_failure: called with the error of a role that is lost.
        on_signal: called with the number of a signal that asked a role to stop.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        policy: RegistrationPolicy,
        interval: HeartbeatInterval,
        on_failure: Callable[[ClusterError], None],
        on_signal: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._listener = listener
        self._policy = policy
        self._on_failure = on_failure
        self._acceptor = _Acceptor(secret)
        self._keys = KeyValues()
        self._monitor = HeartbeatMonitor(interval, self._lose, on_signal)
        self._registered: set[str] = set()
        self._failure = b""
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    def __enter__(self) -> RendezvousServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call_soon(self._closing.set)
        self._thread.join(_END_SECONDS)

    def stop(self, word: StopMessage, wait_seconds: float) -> None:
        """Report to every role that the run has failed, and wait until they left; the first report counts."""
        self._call_soon(self._stop, word)
        self.await_departures(wait_seconds)

    def await_registrations(self, timeout_seconds: float) -> None:
        """Wait until every role of the cluster has registered."""
        topology = self._policy.topology
        names = {str(role) for role in (*topology.trainers, *topology.workers)}
        deadline = time.monotonic() + timeout_seconds
        while not self._registered.issuperset(names) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def await_departures(self, timeout_seconds: float) -> None:
        """Wait until every role has left or is lost."""
        departed = threading.Event()
        self._call_soon(self._monitor.call_after_departures, departed.set)
        departed.wait(timeout_seconds)

    def _call_soon(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop has failed, and its error is on the way
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:  # raised in the main thread
            self._on_failure(ClusterError(f"the rendezvous has failed: {first_line(error)}"))

    async def _serve(self) -> None:
        forever = self._monitor.count_silence(), self._accept_all()
        background = [asyncio.create_task(each) for each in forever]
        closing = asyncio.create_task(self._closing.wait())
        ended, _ = await asyncio.wait([*background, closing], return_when=asyncio.FIRST_COMPLETED)
        self._listener.close()
        for task in ended - {closing}:
            task.result()  # an error: they do not return

    async def _accept_all(self) -> None:
        """Accept one connection after the other.

        An asyncio server accepts all that wait at once. Here, in a crowd, each connection is served once
        before the next ones replace it.
        """
        self._listener.setblocking(False)
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                connection, (address, *_) = await self._loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    raise
                await asyncio.sleep(_SECONDS_WITHOUT_DESCRIPTORS)
                continue
            tasks.add(task := self._loop.create_task(self._handle(connection, address)))
            task.add_done_callback(tasks.discard)

    async def _handle(self, connection: socket.socket, address: str) -> None:
        cipher, is_local = None, connection.getsockname()[0] == address
        try:
            cipher = await self._acceptor.authenticate(connection, address)
        finally:
            if cipher is None:
                connection.close()
        if cipher is not None:
            with self._monitor.arrival() as end_arrival:
                reader, writer = await asyncio.open_connection(sock=connection, limit=_BUFFER_BYTES)
                channel = MasterChannel(reader, writer, cipher)
                try:
                    purpose, *message = await channel.receive()
                    end_arrival()
                    if purpose == HEARTBEATS:
                        await self._register(channel, Registration.unpacked(message[0]), address, is_local)
                    else:
                        await self._keys.serve(channel)
                except (OSError, EOFError):
                    pass  # the role may live on; its heartbeats show that
                finally:
                    writer.close()

    async def _register(
        self, channel: MasterChannel, registration: Registration, address: str, is_local: bool
    ) -> None:
        role = registration.role
        if role in self._registered:  # whatever else is wrong with this one, the cluster goes on
            self._keys.set(f"{TWICE}/{role}", b"")
            await channel.send(TAKEN)
            return
        if (reason := self._policy.rejection_reason(registration)) is not None:
            await channel.send(REJECTED, reason.encode())
            return
        self._registered.add(role)
        if self._policy.end_reason:
            await channel.send(RUN_ENDED, self._policy.end_reason.encode())
            return
        response = ACCEPTED, self._policy.acceptance.packed()
        connected = ConnectedRole(role, registration.host, registration.pid, address, is_local)
        await self._monitor.monitor(channel, connected, response, lambda: self._failure)

    def _lose(self, error: LostRoleError) -> None:
        if not self._failure:  # else the main thread is leaving with the first error
            self._on_failure(error)
        self._loop.call_later(_GRACE_SECONDS, self._stop, StopMessage(exit_code(error), str(error)))

    def _stop(self, word: StopMessage) -> None:
        self._failure = self._failure or str(word).encode()
        for key in (VERDICT, STOP):
            if not self._keys.has([key]):
                self._keys.set(key, self._failure)


def report_end(config: RunConfig, secret: Secret, reason: str) -> None:
    """Tell restarted roles of a run that has ended to exit; returns once all have registered.

    A role that does not register within ``cluster.start_timeout_seconds`` was not restarted.

    Raises:
        ConfigError: this host does not have the master's address, or its port is in use.
    """
    section = config.cluster
    acceptance = Acceptance("", socket.gethostname(), "", "")
    policy = RegistrationPolicy(section.topology, acceptance, lambda _: None, reason)
    interval = HeartbeatInterval(section.heartbeat_timeout_seconds)
    with listen(section.master_address, section.master_port or DEFAULT_PORT) as listener:
        with RendezvousServer(listener, secret, policy, interval, lambda _: None) as server:
            server.await_registrations(section.start_timeout_seconds)


class _Acceptor:
    """Authenticates peers. Unauthenticated peers are few, and get little time and memory."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        # By address, in the order of their arrival.
        self._unauthenticated: defaultdict[str, dict[asyncio.Task[object], None]] = defaultdict(dict)
        self._rejected = 0
        self._next_line_at = 0.0

    async def authenticate(self, connection: socket.socket, address: str) -> FrameCipher | None:
        """Return the cipher of a peer that has the secret; None for another peer."""
        task = asyncio.current_task()
        assert task is not None, "each connection has a task"
        self._unauthenticated[address][task] = None
        if sum(map(len, self._unauthenticated.values())) > MAX_UNAUTHENTICATED:
            # Disconnect the oldest of the most crowded address: peers of other addresses are not affected,
            # and a peer that has the secret has the time to prove it.
            crowd = max(self._unauthenticated.values(), key=len)
            oldest = next(iter(crowd))
            del crowd[oldest]
            oldest.cancel()
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                return await authenticate(connection, self._secret)
        except ChannelError as error:
            self._log(address, str(error))
        except (OSError, EOFError):
            self._log(address, "no proof of the secret")
        finally:
            self._unauthenticated[address].pop(task, None)
            if not self._unauthenticated[address]:
                del self._unauthenticated[address]
        return None

    def _log(self, address: str, reason: str) -> None:
        """Log a rejected peer, at most one line every ten seconds."""
        self._rejected += 1
        if time.monotonic() < self._next_line_at:
            return
        self._next_line_at = time.monotonic() + _LINE_EVERY_SECONDS
        line = "%d connections refused, the last from %s: %s"
        _LOG.warning(line, self._rejected, address, reason)


class KeyValues:
    """The keys and values that all roles share; belongs to an event loop.

    The operations are those of torch's own stores::

        set key value                      check key ..              -> 1 if all exist
        get seconds key      -> value      add key amount            -> sum
        wait seconds key ..                compare_set key old new   -> the value afterwards
        delete_key key       -> 1 if it existed

    The response to ``get`` and ``wait`` comes once every key exists, or is "late".
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def has(self, names: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return all(name in self._values for name in names)

    def set(self, key: str, value: bytes) -> None:
        """Store a value, and wake up all that wait for one."""
        self._values[key] = value
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, channel: MasterChannel) -> None:
        """Respond to a role's requests until it closes the connection; OSError or EOFError then."""
        while True:
            operation, *arguments = await channel.receive()
            try:
                response = await self._perform(operation.decode(), arguments)
            except TimeoutError:
                await channel.send(LATE)
            else:
                await channel.send(_DONE, response)

    async def _perform(self, operation: str, arguments: list[bytes]) -> bytes:
        if operation in ("get", "wait"):
            seconds, *names = (argument.decode() for argument in arguments)
            async with asyncio.timeout(float(seconds)):
                while not self.has(names):
                    await self._changed.wait()
            return self._values[names[0]] if operation == "get" else b""
        if operation == "check":
            return b"%d" % self.has([argument.decode() for argument in arguments])
        key, values = arguments[0].decode(), arguments[1:]
        if operation == "set":
            self.set(key, values[0])
            return b""
        if operation == "add":
            self.set(key, b"%d" % (int(self._values.get(key, b"0")) + int(values[0])))
            return self._values[key]
        if operation == "compare_set":
            old, new = values
            if self._values.get(key, b"") == old:
                self.set(key, new)
            return self._values.get(key, old)
        if operation == "delete_key":
            return b"%d" % (self._values.pop(key, None) is not None)
        raise ChannelError(f"no such operation: {operation}")
