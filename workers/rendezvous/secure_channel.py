"""A mutually authenticated, encrypted connection between a role and the master.

::

    role                              master
    ────                              ──────
                                ◄──   greeting, public key
    public key, proof           ──►                          closes if the proof is wrong
                                ◄──   proof
    encrypted frames            ◄─►   encrypted frames

Both sides generate a key pair for each connection, and exchange the public keys (X25519, RFC 7748). A proof
is derived from the secret and both public keys, so a man in the middle cannot replace a key. The keys of
frames are derived from the secret and the result of the exchange. So nobody can decrypt a recorded connection
later, even with the secret. Each direction has its own key (``hybrid/security/secret.py``). An eavesdropper
sees only the lengths of frames. This module does not import torch.
"""

import asyncio
import hmac
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from hybrid.errors import ClusterError, ConfigError, first_line
from hybrid.security.rejections import RejectionError
from hybrid.security.secret import TAG_BYTES, VARIABLE, DirectionCipher, Secret
from workers.rendezvous.heartbeat import HeartbeatInterval
from workers.rendezvous.host_setup import MasterAddress

GREETING = b"hybrid-4"
KEY_BYTES = PROOF_BYTES = 32
LARGEST_FRAME = 1 << 20
_REJECTION = bytes(PROOF_BYTES)
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16

Side: TypeAlias = Literal["role", "master"]


class ChannelError(ConnectionError):
    """The other side, or a man in the middle, violated the protocol."""


class FrameCipher:
    """Encrypts the frames that one side of a connection sends, and decrypts the frames that it receives.

    Args:
        public_keys: the public key of the master, followed by the public key of the role.
        agreed: result of the key exchange.
        side: the side that sends with this cipher.
    """

    def __init__(self, secret: Secret, public_keys: bytes, agreed: bytes, side: Side) -> None:
        other: Side = "role" if side == "master" else "master"
        self._sending, self._receiving = (
            DirectionCipher(secret.key(f"rendezvous frames of {sender}", public_keys, agreed))
            for sender in (side, other)
        )

    def seal(self, fields: Sequence[bytes]) -> bytes:
        """Return the encrypted frame of a message; ValueError if the message exceeds 1 MiB."""
        body = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
        if len(body) > LARGEST_FRAME:
            raise ValueError(f"a message has {len(body)} bytes; at most {LARGEST_FRAME} can be sent")
        sealed = self._sending.seal(body)
        return _LENGTH.pack(len(sealed)) + sealed

    def open(self, sealed: bytes) -> list[bytes]:
        """Decrypt the next frame, passed without its header; return the fields. ChannelError if invalid."""
        try:
            body = self._receiving.open(sealed)
        except RejectionError as error:
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
        raise ChannelError(f"a frame has {length} bytes")
    return length


class KeyPair:
    """One side's keys for one connection."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """Return the result of the exchange with the other side's key; ChannelError if the key is invalid."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # a point of small order, with which every exchange results in zeros
            raise ChannelError("invalid public key") from None


def _proof(secret: Secret, side: Side, public_keys: bytes) -> bytes:
    return secret.key(f"rendezvous proof of {side}", public_keys)


class Channel:
    """A role's side of a connection to the master; for one thread at a time.

    Args:
        interval: limits how long the master may be silent while a response is due.

    Raises:
        OSError: no process listens at the address, or the connection is broken.
        ConfigError: the master has another secret.
        ClusterError: another program or version listens at the address, or the master is frozen.
    """

    def __init__(self, address: str, port: int, secret: Secret, interval: HeartbeatInterval) -> None:
        self.interval = interval  # callers may replace it
        self._buffer = bytearray()
        self._socket = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._where = f"{address}:{port}"
            self.local_address = str(self._socket.getsockname()[0])
            self._is_same_host = self.local_address == self._socket.getpeername()[0]
            greeting = self._read(len(GREETING))
            if greeting != GREETING:
                rule = "check address and port, and install the same version on every host"
                raise ClusterError(
                    f"the process that listens at {self._where} is no master of this version; {rule}"
                )
            own, master_key = KeyPair(), self._read(KEY_BYTES)
            public_keys = master_key + own.public
            self._socket.sendall(own.public + _proof(secret, "role", public_keys))
            proof = self._read(PROOF_BYTES)
            if not hmac.compare_digest(proof, _proof(secret, "master", public_keys)):
                rule = f"has another secret; give every role the same, or in {VARIABLE}"
                raise ConfigError("cluster.secret_file", f"the master at {self._where} {rule}")
            self._cipher = FrameCipher(secret, public_keys, own.agree(master_key), "role")
        except BaseException:
            self.close()
            raise

    def send(self, *fields: bytes) -> None:
        """Send a message; ClusterError if the master is frozen, OSError if the connection is broken."""
        frame = self._cipher.seal(fields)
        self._socket.settimeout(self.interval.timeout_seconds)
        try:
            self._socket.sendall(frame)
        except TimeoutError:
            raise self._silence_error() from None

    def receive(self, due_seconds: float = 0.0) -> list[bytes]:
        """Return the next message.

        Args:
            due_seconds: time from now until the message is due; negative if it is overdue.

        Raises:
            ClusterError: no message arrived within the heartbeat timeout after the due time.
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
                    # Read at least once: if this process was stopped, the deadline has passed, but the
                    # message has arrived.
                    self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                    received = self._socket.recv(_READ_BYTES)
                    if not received:
                        raise ConnectionResetError("the connection was closed")
                    self._buffer += received
                result = bytes(self._buffer[:count])
                del self._buffer[:count]
                return result
        raise self._silence_error()

    def _silence_error(self) -> ClusterError:
        name = "the master" if self._is_same_host else f"the master at {self._where}"
        return ClusterError(self.interval.describe_silence(name, self._is_same_host))

    def close(self) -> None:
        self._socket.close()


def connect(
    address: MasterAddress, secret: Secret, interval: HeartbeatInterval, timeout_seconds: float
) -> Channel:
    """Connect to the master. Retry until the timeout while no connection is possible.

    Raises the errors of :class:`Channel`, but ClusterError instead of OSError.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return Channel(address.host, address.port, secret, interval)
        except OSError as error:
            if time.monotonic() > deadline:
                reason = error.strerror or first_line(error)
                raise ClusterError(
                    f"no master at {address} after {timeout_seconds:g} s: {reason} (from host "
                    f"{socket.gethostname()}); check that the master runs, its address and port "
                    "(cluster.master), and firewalls"
                ) from error
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class MasterChannel:
    """The master's side of a connection to a role."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    cipher: FrameCipher

    async def send(self, *fields: bytes) -> None:
        self.writer.write(self.cipher.seal(fields))
        await self.writer.drain()

    async def receive(self) -> list[bytes]:
        """Return the next message; OSError or EOFError if the connection is broken."""
        length = sealed_length(await self.reader.readexactly(_LENGTH.size))
        return self.cipher.open(await self.reader.readexactly(length))


async def authenticate(connection: socket.socket, secret: Secret) -> FrameCipher:
    """Perform the handshake with a peer that has connected to the master; return the connection's cipher.

    Args:
        connection: a socket in non-blocking mode.

    Raises:
        ChannelError: the peer does not have the secret, or sent an invalid key.
        OSError, EOFError: the connection is broken.
    """
    loop, own = asyncio.get_running_loop(), KeyPair()
    await loop.sock_sendall(connection, GREETING + own.public)
    received = b""
    while missing := KEY_BYTES + PROOF_BYTES - len(received):
        chunk = await loop.sock_recv(connection, missing)
        if not chunk:
            raise EOFError
        received += chunk
    role_key = received[:KEY_BYTES]
    public_keys = own.public + role_key
    if not hmac.compare_digest(received[KEY_BYTES:], _proof(secret, "role", public_keys)):
        await loop.sock_sendall(connection, _REJECTION)
        raise ChannelError("wrong secret")
    cipher = FrameCipher(secret, public_keys, own.agree(role_key), "master")
    await loop.sock_sendall(connection, _proof(secret, "master", public_keys))
    return cipher
