"""A mutually authenticated, encrypted connection between a role and the master.

::

    role                              master
    ────                              ──────
                                ◄──   greeting, public key
    public key, proof           ──►                          closes if the proof is wrong
                                ◄──   proof
    encrypted frames            ◄─►   encrypted frames

Both sides generate a key pair for each connection, and exchange the public keys (X25519, RFC 7748). A proof
is derived from the secret and both public keys, so nobody in between can replace a key. The keys of frames
are derived from the secret and the result of the exchange. Nobody who has recorded a connection can compute
them later, even with the secret. Each direction has its own key (``hybrid/security/sealed_stream.py``). An
eavesdropper learns lengths only. Free of torch.
"""

import asyncio
import errno
import hmac
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from hybrid.errors import ClusterError, ConfigError, first_line
from hybrid.security.rejected_messages import RejectedMessage
from hybrid.security.sealed_stream import TAG_BYTES, Direction
from hybrid.security.secret import VARIABLE, Secret
from workers.rendezvous.heartbeat import HeartbeatInterval
from workers.rendezvous.master_address import MasterAddress, is_loopback

GREETING = b"hybrid-3"
_FAMILY = b"hybrid-"  # first bytes of the greeting in every version
KEY_BYTES = PROOF_BYTES = 32
LARGEST_FRAME = 1 << 20
_REJECTION = bytes(PROOF_BYTES)
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)

Side: TypeAlias = Literal["role", "master"]


class ChannelError(ConnectionError):
    """The other side, or somebody in between, broke the protocol."""


class FrameCipher:
    """Encrypts the frames that one side of a connection sends, and decrypts those that it receives.

    Args:
        public_keys: of this connection, the master's and then the role's.
        agreed: result of the key exchange.
    """

    def __init__(self, secret: Secret, public_keys: bytes, agreed: bytes, side: Side) -> None:
        other: Side = "role" if side == "master" else "master"
        self._sending, self._receiving = (
            Direction(secret.key(f"rendezvous frames of {sender}", public_keys, agreed))
            for sender in (side, other)
        )

    def seal(self, fields: Sequence[bytes]) -> bytes:
        """Return the frame of a message."""
        body = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
        if len(body) > LARGEST_FRAME:
            raise ValueError(f"a message of {len(body)} bytes; at most {LARGEST_FRAME} can be sent")
        sealed = self._sending.seal(body)
        return _LENGTH.pack(len(sealed)) + sealed

    def open(self, sealed: bytes) -> list[bytes]:
        """Return the message of a frame, which comes without its length.

        Raises:
            ChannelError: it is not the frame that the other side has sent next.
        """
        try:
            body = self._receiving.open(sealed)
        except RejectedMessage as error:
            raise ChannelError(f"a frame was rejected: {error}") from None
        fields, at = [], 0
        while at < len(body):
            start = at + _LENGTH.size
            at = start + _LENGTH.unpack_from(body, at)[0]
            fields.append(body[start:at])
        return fields


def sealed_length(header: bytes) -> int:
    """Return the number of bytes after the header of a frame; ChannelError if there are too many."""
    length: int = _LENGTH.unpack(header)[0]
    if length > LARGEST_FRAME + TAG_BYTES:
        raise ChannelError(f"a frame of {length} bytes")
    return length


class KeyPair:
    """One side's keys for one connection."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """Return the result of the exchange with the other side's public key."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # a point of small order, with which every exchange results in zeros
            raise ChannelError("no public key") from None


def _proof(secret: Secret, side: Side, public_keys: bytes) -> bytes:
    return secret.key(f"rendezvous proof of {side}", public_keys)


class Channel:
    """A role's side of a connection; for one thread at a time.

    Args:
        interval: limits the silence of a master that owes a response.

    Attributes:
        interval: may be replaced.

    Raises:
        OSError: there is no master.
        ConfigError: it has another secret.
        ClusterError: something else listens there, or the master is frozen: its kernel has accepted the
            connection, and nothing comes. A master on another host may also be unreachable.
    """

    def __init__(self, address: str, port: int, secret: Secret, interval: HeartbeatInterval) -> None:
        self.interval = interval
        self._buffer = bytearray()
        self._socket = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._where = f"{address}:{port}"
            self._is_same_host = self._socket.getsockname()[0] == self._socket.getpeername()[0]
            greeting = self._read(len(GREETING))
            if greeting != GREETING and greeting.startswith(_FAMILY):
                rule = "speaks as another version of this project does; install the same on every host"
                raise ClusterError(f"the master at {self._where} {rule}")
            if greeting != GREETING:
                raise ClusterError(f"what listens at {self._where} is no master; check address and port")
            own, masters = KeyPair(), self._read(KEY_BYTES)
            public_keys = masters + own.public
            self._socket.sendall(own.public + _proof(secret, "role", public_keys))
            proof = self._read(PROOF_BYTES)
            if not hmac.compare_digest(proof, _proof(secret, "master", public_keys)):
                rule = f"has another secret; give every role the same, or in {VARIABLE}"
                raise ConfigError("cluster.secret_file", f"the master at {self._where} {rule}")
            self._cipher = FrameCipher(secret, public_keys, own.agree(masters), "role")
        except BaseException:
            self.close()
            raise

    @property
    def local_address(self) -> str:
        """The address of this host on the connection."""
        return str(self._socket.getsockname()[0])

    def send(self, *fields: bytes) -> None:
        """Send a message; errors as of :meth:`receive`."""
        frame = self._cipher.seal(fields)
        self._socket.settimeout(self.interval.timeout_seconds)
        try:
            self._socket.sendall(frame)
        except TimeoutError:
            raise self._silence() from None

    def receive(self, due_seconds: float = 0.0) -> list[bytes]:
        """Return the next message.

        Args:
            due_seconds: from now, when the message is due; below 0 if it was due before.

        Raises:
            ClusterError: nothing came within the heartbeat timeout after that. The master is frozen or
                unreachable.
            OSError: the connection is broken.
        """
        header = self._read(_LENGTH.size, due_seconds)
        return self._cipher.open(self._read(sealed_length(header)))

    def _read(self, count: int, due_seconds: float = 0.0) -> bytes:
        for turn in range(self.interval.turns):
            seconds = self.interval.turn_seconds + (0.0 if turn else due_seconds)
            deadline = time.monotonic() + seconds
            with suppress(TimeoutError):
                while len(self._buffer) < count:
                    # Look at least once: if this process was stopped, its time is over, and the message is
                    # there.
                    self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                    received = self._socket.recv(_READ_BYTES)
                    if not received:
                        raise ConnectionResetError("the connection was closed")
                    self._buffer += received
                taken = bytes(self._buffer[:count])
                del self._buffer[:count]
                return taken
        raise self._silence()

    def _silence(self) -> ClusterError:
        if self._is_same_host:
            return ClusterError(self.interval.describe_frozen("the master"))
        return ClusterError(self.interval.describe_unreachable(f"the master at {self._where}"))

    def close(self) -> None:
        self._socket.close()


def connect(
    address: MasterAddress, secret: Secret, interval: HeartbeatInterval, timeout_seconds: float
) -> Channel:
    """Connect to the master, which may not be there yet.

    Args:
        timeout_seconds: how long to wait for it to listen.

    Raises:
        ClusterError: it does not listen, is frozen, or is no master.
        ConfigError: it has another secret.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return Channel(address.host, address.port, secret, interval)
        except OSError as error:
            if time.monotonic() > deadline:
                waited = f"no master at {address} after {timeout_seconds:g} s"
                raise ClusterError(f"{waited}: {_diagnose(address, error)}") from error
            time.sleep(_POLL_SECONDS)


def _diagnose(address: MasterAddress, error: OSError) -> str:
    """Return why no connection is possible, and what to check."""
    host = socket.gethostname()
    if isinstance(error, socket.gaierror):
        return f"host {host} knows no {address.host} ({error.strerror}); check the name, or give its address"
    if isinstance(error, ConnectionRefusedError):
        resolved = ""
        with suppress(OSError):
            number = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4][0]
            # A name may be this host by mistake (Debian's 127.0.1.1).
            if number != address.host and not is_loopback(address.host):
                resolved = f" ({address.host} is {number} on host {host})"
        return (
            f"connection refused{resolved}, so nobody listens on that port there; start it, or "
            "check the port and its cluster.master"
        )
    if error.errno in _NO_ROUTE:
        return f"host {host} has no route to it ({error.strerror}); check the address and the network"
    if isinstance(error, TimeoutError):
        return (
            f"nothing comes back to host {host}; check the address, and whether a firewall blocks port "
            f"{address.port}"
        )
    return f"{first_line(error)}; start it, or check its log"


class MasterChannel:
    """The master's side of a connection to a role."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cipher: FrameCipher
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._cipher = cipher

    async def send(self, *fields: bytes) -> None:
        self._writer.write(self._cipher.seal(fields))
        await self._writer.drain()

    async def receive(self) -> list[bytes]:
        """Return the next message; OSError or EOFError if the connection is broken."""
        length = sealed_length(await self._reader.readexactly(_LENGTH.size))
        return self._cipher.open(await self._reader.readexactly(length))


async def authenticate(connection: socket.socket, secret: Secret) -> FrameCipher:
    """Shake hands with a peer that has connected to the master.

    Args:
        connection: in non-blocking mode.

    Raises:
        ChannelError: the peer does not have the secret; it is told so.
        OSError, EOFError: the connection is broken.
    """
    loop, own = asyncio.get_running_loop(), KeyPair()
    await loop.sock_sendall(connection, GREETING + own.public)
    received = b""
    while missing := KEY_BYTES + PROOF_BYTES - len(received):
        if not (chunk := await loop.sock_recv(connection, missing)):
            raise EOFError
        received += chunk
    roles = received[:KEY_BYTES]
    public_keys = own.public + roles
    if not hmac.compare_digest(received[KEY_BYTES:], _proof(secret, "role", public_keys)):
        await loop.sock_sendall(connection, _REJECTION)
        raise ChannelError("wrong secret")
    cipher = FrameCipher(secret, public_keys, own.agree(roles), "master")
    await loop.sock_sendall(connection, _proof(secret, "master", public_keys))
    return cipher
