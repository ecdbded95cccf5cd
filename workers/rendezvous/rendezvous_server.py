"""The master's rendezvous server: authentication of roles, key-value store, and monitoring of heartbeats.

One thread with an event loop serves all connections, so a role that waits for a key takes no thread. This
module does not import torch.
"""

import asyncio
import dataclasses
import errno
import socket
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from hybrid.config import RunConfig
from hybrid.config.loading import to_toml
from hybrid.errors import ClusterError, HybridError
from hybrid.security.rejections import RejectionLog
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role
from hybrid.user_code.user_modules import kind_and_text, log_traceback
from workers.exit_codes import ExitCode, StopMessage, exit_code
from workers.rendezvous import heartbeat
from workers.rendezvous.heartbeat import HeartbeatInterval, Registration, own_versions
from workers.rendezvous.host_setup import DEFAULT_PORT, listen
from workers.rendezvous.interrupt import EndedRoleError, LostRoleError
from workers.rendezvous.secure_channel import ChannelError, FrameCipher, MasterChannel, authenticate

GO, STOP = "go", "stop"  # keys for which roles wait, set by the master
STORE = b"store"  # purpose of a connection that reads and writes keys
LATE = b"late"
_DONE = b"done"

HANDSHAKE_SECONDS = 5.0
# This many connections take 0.1 s even in a flood. A role completes its handshake in less time.
MAX_UNAUTHENTICATED = 512
_BUFFER_BYTES = 4096
_SECONDS_WITHOUT_DESCRIPTORS = 0.1
_END_SECONDS = 5.0
_POLL_SECONDS = 0.01
# Before other roles get the error, the main thread has this time to report the error with more details. It is
# longer than a diagnosis by pings, which takes up to three seconds.
_GRACE_SECONDS = 4.0


class RendezvousServer:
    """Serves the rendezvous of a cluster during a ``with`` block.

    Args:
        listener: a listening socket; closed at the end.
        config: configuration of the run; sent to each role that registers.
        on_failure: called with an error if a role fails, is lost or has other versions, or this server fails.
        on_signal: called with the number of a stop signal that a role has received.
        end_reason: why the run has ended, for roles that register later; empty if the run has not ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        config: RunConfig,
        on_failure: Callable[[HybridError], None],
        on_signal: Callable[[int], None] = lambda _: None,
        end_reason: str = "",
    ) -> None:
        self._listener = listener
        self._members: dict[Role, Registration] = {}
        self._topology = config.cluster.topology
        # A configuration may have very many keys.
        self._response = heartbeat.ACCEPTED, zlib.compress(to_toml(config).encode())
        self._on_failure = on_failure
        self._end_reason = end_reason
        self._secret = secret
        # Tasks of unauthenticated connections by address, in the order of arrival.
        self._unauthenticated: defaultdict[str, dict[asyncio.Task[object], None]] = defaultdict(dict)
        self._rejections = RejectionLog("connection")
        self._keys = KeyValues()
        self._interval = HeartbeatInterval(config.cluster.heartbeat_timeout_seconds)
        self._on_signal = on_signal
        self._silent_turns: dict[Registration, int] = {}  # of registered roles that have not left
        self._arriving = 0  # authenticated peers that have not registered yet
        self._failure = b""
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call_soon(self._closing.set)
        self._thread.join(_END_SECONDS)

    def stop(self, message: StopMessage, wait_seconds: float) -> None:
        """Send a message to every role, unless an earlier message was sent; wait until all roles have left.

        A role receives the message as the response to its next heartbeat. ``wait_seconds`` limits the wait.
        """
        self._call_soon(self._stop, message)
        self.await_departures(wait_seconds)

    def await_members(self, timeout_seconds: float) -> dict[Role, Registration]:
        """Return the registrations of all other roles, once all exist; ClusterError if one is late."""
        deadline = time.monotonic() + timeout_seconds
        while missing := [role for role in self._topology.roles[1:] if role not in self._members]:
            if time.monotonic() > deadline:
                limit = f"{timeout_seconds:g} s (cluster.start_timeout_seconds)"
                raise ClusterError(f"missing after {limit}: {', '.join(map(str, missing))}")
            time.sleep(_POLL_SECONDS)
        return {role: self._members[role] for role in self._topology.roles[1:]}

    def await_departures(self, timeout_seconds: float) -> None:
        """Wait until every role has left or is lost, or until the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while (self._silent_turns or self._arriving) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _call_soon(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop has failed; on_failure reports its error
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:  # raised in the main thread
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        log_traceback(error)
        self._on_failure(ClusterError(f"the rendezvous has failed: {kind_and_text(error)}"))

    async def _serve(self) -> None:
        endless = self._count_silence(), self._accept_all()
        background = [asyncio.create_task(each) for each in endless]
        closing = asyncio.create_task(self._closing.wait())
        ended, _ = await asyncio.wait([*background, closing], return_when=asyncio.FIRST_COMPLETED)
        self._listener.close()
        for task in ended - {closing}:
            task.result()  # raises the error that ended an endless task

    async def _accept_all(self) -> None:
        """Accept connections one by one.

        An asyncio server accepts all pending connections at once. In a flood, the oldest of them would be
        closed before anything is read from them.
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
        is_local = connection.getsockname()[0] == address
        cipher = await self._authenticate(connection, address)
        if cipher is None:
            return
        reader, writer = await asyncio.open_connection(sock=connection, limit=_BUFFER_BYTES)
        channel = MasterChannel(reader, writer, cipher)
        try:
            self._arriving += 1
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    purpose, *message = await channel.receive()
                if purpose == heartbeat.HEARTBEATS:
                    role = dataclasses.replace(Registration.unpacked(message[0]), is_local=is_local)
                    response = self._register(role)
            finally:
                self._arriving -= 1
            if purpose != heartbeat.HEARTBEATS:
                await self._keys.serve(channel)
            elif response is self._response:
                await self._monitor(channel, role)
            else:
                await channel.send(*response)
        except (OSError, EOFError):
            pass  # the end of a role is detected by its heartbeats
        except Exception as error:  # raised in the main thread
            self._fail(error)
        finally:
            writer.close()

    async def _authenticate(self, connection: socket.socket, address: str) -> FrameCipher | None:
        """Return the connection's cipher. If the peer lacks the secret, close the connection; return None.

        Limits apply to the number of unauthenticated peers, and to the time and memory of each peer.
        """
        cipher = None
        task = asyncio.current_task()
        assert task is not None, "each connection has a task"
        self._unauthenticated[address][task] = None
        if sum(map(len, self._unauthenticated.values())) > MAX_UNAUTHENTICATED:
            # Disconnect the oldest peer of the address with the most peers. So a flood does not affect other
            # addresses, and a role of the same address has time for its handshake.
            crowd = max(self._unauthenticated.values(), key=len)
            oldest = next(iter(crowd))
            del crowd[oldest]
            oldest.cancel()
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                cipher = await authenticate(connection, self._secret)
        except ChannelError as error:
            self._rejections.add(f"{error}, from {address}")
        except (OSError, EOFError):
            self._rejections.add(f"no proof of the secret, from {address}")
        finally:
            self._unauthenticated[address].pop(task, None)
            if not self._unauthenticated[address]:
                del self._unauthenticated[address]
            if cipher is None:  # also after a cancellation
                connection.close()
        return cipher

    def _register(self, member: Registration) -> tuple[bytes, ...]:
        name = member.role
        role = next((each for each in self._topology.roles if str(each) == name), MASTER)
        if role == MASTER:
            return heartbeat.REJECTED, f"there is no {name} in a cluster of {self._topology}".encode()
        # Check this before the versions: a duplicate must not end the run.
        if role in self._members:
            return (heartbeat.TAKEN,)
        versions = own_versions()
        if versions != member.versions:
            reason = (
                f"{name} on host {member.host} has {member.versions}, the master on host "
                f"{socket.gethostname()} {versions}; install the same on both"
            )
            self._on_failure(HybridError(reason))
            return heartbeat.REJECTED, reason.encode()
        if not self._end_reason:
            self._silent_turns[member] = 0
        self._members[role] = member
        return (heartbeat.RUN_ENDED, self._end_reason.encode()) if self._end_reason else self._response

    async def _monitor(self, channel: MasterChannel, role: Registration) -> None:
        """Receive the heartbeats of a role until it leaves; the registration is the first heartbeat."""
        try:
            message = [heartbeat.ALIVE]
            response: tuple[bytes, ...] = self._response
            while message[0] in (heartbeat.ALIVE, heartbeat.SIGNALED):
                if message[0] == heartbeat.SIGNALED:
                    self._on_signal(int(message[1]))
                self._silent_turns[role] = 0
                await channel.send(*response)
                message = await channel.receive()
                response = (self._failure,)
            reason = message[1].decode()
            if reason:
                self._report_loss(EndedRoleError(f"{role} has ended: {reason}", ExitCode(int(message[2]))))
        except (OSError, EOFError):
            self._silent_turns.pop(role, None)
            self._report_loss(LostRoleError(f"lost {role}"))
        finally:
            self._silent_turns.pop(role, None)

    async def _count_silence(self) -> None:
        while True:
            await asyncio.sleep(self._interval.turn_seconds)
            for role in list(self._silent_turns):
                self._silent_turns[role] += 1
                if self._silent_turns[role] >= self._interval.turns:
                    del self._silent_turns[role]
                    self._report_loss(
                        LostRoleError(self._interval.describe_silence(str(role), role.is_local))
                    )

    def _report_loss(self, error: LostRoleError) -> None:
        if not self._failure:  # else the main thread already handles the first error
            self._on_failure(error)
        self._loop.call_later(_GRACE_SECONDS, self._stop, StopMessage(exit_code(error), str(error)))

    def _stop(self, message: StopMessage) -> None:
        self._failure = self._failure or str(message).encode()


def report_end(config: RunConfig, secret: Secret, reason: str) -> None:
    """As the master of an ended run, send ``reason`` to trainers and workers that were restarted.

    Return when every role has registered, at the latest after ``cluster.start_timeout_seconds``.
    """
    address, port = config.cluster.master_endpoint
    with listen(address, port or DEFAULT_PORT) as listener:
        with RendezvousServer(listener, secret, config, lambda _: None, end_reason=reason) as server:
            with suppress(ClusterError):
                server.await_members(config.cluster.start_timeout_seconds)


class KeyValues:
    """The keys and values that all roles share; for use in one event loop.

    The operations are those of torch's stores::

        set key value                      check key ..              -> 1 if all exist
        get seconds key      -> value      add key amount            -> sum
        wait seconds key ..                compare_set key old new   -> the value afterwards
        delete_key key       -> 1 if it existed

    The response to ``get`` and ``wait`` is sent once every key exists; after the timeout, it is "late".
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def has(self, names: Sequence[str]) -> bool:
        return all(name in self._values for name in names)

    def set(self, key: str, value: bytes) -> None:
        """Store a value, and wake all waiting requests."""
        self._values[key] = value
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, channel: MasterChannel) -> None:
        """Respond to a role's requests; OSError or EOFError when the role closes the connection."""
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
