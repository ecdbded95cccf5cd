"""A connection to the master of those who share its secret: both sides prove it, then every frame is sealed.

::

    role                              master
    ────                              ──────
                                ◄──   greeting, public key
    public key, proof           ──►                          closes where the proof is wrong
                                ◄──   proof
    sealed frames               ◄─►   sealed frames

Both sides draw a key pair for each connection, and exchange the public halves (X25519, RFC 7748). Proofs come
of the secret and both public keys, so nobody in between can put in his own. The keys of frames come of the
secret and of what the exchange has agreed on, which nobody can find out later, though he has heard everything
and is told the secret. No key pair is used twice, and each direction has its key: nothing that was said is
good anywhere else (``hybrid/security/sealed_stream.py``). Whoever listens learns lengths only. Free of torch.
"""

import asyncio
import hmac
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from hybrid.errors import ClusterError, ConfigError
from hybrid.security.rejected_messages import RejectedMessage
from hybrid.security.sealed_stream import TAG_BYTES, Direction
from hybrid.security.secret import VARIABLE, Secret
from workers.rendezvous.heartbeat_interval import Rhythm

GREETING = b"hybrid-3"
_FAMILY = b"hybrid-"  # what greetings of other versions begin with
KEY_BYTES = PROOF_BYTES = 32
LARGEST_FRAME = 1 << 20
_REFUSAL = bytes(PROOF_BYTES)
_CONNECT_SECONDS = 5.0
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16

Side: TypeAlias = Literal["role", "master"]


class ChannelError(ConnectionError):
    """The other side broke the protocol, or somebody between the two did."""


class Seal:
    """Seals what one side of a connection sends, and opens what it receives.

    Args:
        public_keys: of this connection, the master's and then the role's.
        agreed: what came of their exchange.
    """

    def __init__(self, secret: Secret, public_keys: bytes, agreed: bytes, side: Side) -> None:
        other: Side = "role" if side == "master" else "master"
        self._sending, self._receiving = (
            Direction(secret.key(f"rendezvous frames of {sender}", public_keys, agreed))
            for sender in (side, other)
        )

    def seal(self, parts: Sequence[bytes]) -> bytes:
        """The frame of a message."""
        body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
        if len(body) > LARGEST_FRAME:
            raise ValueError(f"a message of {len(body)} bytes; at most {LARGEST_FRAME} can be sent")
        sealed = self._sending.seal(body)
        return _LENGTH.pack(len(sealed)) + sealed

    def open(self, sealed: bytes) -> list[bytes]:
        """The message of a frame, which comes without its length.

        Raises:
            ChannelError: it is not the frame that the other side has sealed next.
        """
        try:
            body = self._receiving.open(sealed)
        except RejectedMessage as error:
            raise ChannelError(f"a frame was refused: {error}") from None
        parts, at = [], 0
        while at < len(body):
            start = at + _LENGTH.size
            at = start + _LENGTH.unpack_from(body, at)[0]
            parts.append(body[start:at])
        return parts


def sealed_length(header: bytes) -> int:
    """How many bytes follow the header of a frame; ChannelError where they are too many."""
    length: int = _LENGTH.unpack(header)[0]
    if length > LARGEST_FRAME + TAG_BYTES:
        raise ChannelError(f"a frame of {length} bytes")
    return length


class KeyPair:
    """One side's keys for one connection.

    Attributes:
        public: what the other side is told.
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """What this pair and the other side's come to; ChannelError where its public key is none."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # one of few points with which anything agrees on zeros
            raise ChannelError("no public key") from None


def _proof(secret: Secret, side: Side, public_keys: bytes) -> bytes:
    return secret.key(f"rendezvous proof of {side}", public_keys)


class Channel:
    """A role's side of a connection; for one thread at a time.

    Args:
        rhythm: says how long the master may be silent where it owes an answer.

    Attributes:
        rhythm: the same; another from when the master has said how long it is to be.

    Raises:
        OSError: there is no master.
        ConfigError: it has another secret.
        ClusterError: something else listens there, or the master is frozen: the system has accepted the
            connection for it, and it says nothing; from another host it may also be out of reach.
    """

    def __init__(self, address: str, port: int, secret: Secret, rhythm: Rhythm) -> None:
        self.rhythm = rhythm
        self._buffer = bytearray()
        self._socket = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._where = f"{address}:{port}"
            self._is_here = self._socket.getsockname()[0] == self._socket.getpeername()[0]
            self._seal = self._shake_hands(secret, self._where)
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, secret: Secret, where: str) -> Seal:
        greeting = self._read(len(GREETING))
        if greeting != GREETING and greeting.startswith(_FAMILY):
            rule = "speaks as another version of this project does; install the same on every host"
            raise ClusterError(f"the master at {where} {rule}")
        if greeting != GREETING:
            raise ClusterError(f"what listens at {where} is no master; check address and port")
        own, masters = KeyPair(), self._read(KEY_BYTES)
        public_keys = masters + own.public
        self._socket.sendall(own.public + _proof(secret, "role", public_keys))
        answer = self._read(PROOF_BYTES)
        if not hmac.compare_digest(answer, _proof(secret, "master", public_keys)):
            rule = f"the master at {where} has another secret; give every role the same, or in {VARIABLE}"
            raise ConfigError("cluster.secret_file", rule)
        return Seal(secret, public_keys, own.agree(masters), "role")

    @property
    def local_address(self) -> str:
        """Of this host: that from which the master was reached."""
        return str(self._socket.getsockname()[0])

    def send(self, *parts: bytes) -> None:
        """Send a message; errors as those of :meth:`receive`."""
        frame = self._seal.seal(parts)
        self._socket.settimeout(self.rhythm.timeout_seconds)
        try:
            self._socket.sendall(frame)
        except TimeoutError:
            raise self._silent() from None

    def receive(self, due_seconds: float = 0.0) -> list[bytes]:
        """The next message.

        Args:
            due_seconds: how long from now the master may take for it; below 0 where it was due before.

        Raises:
            ClusterError: the master is frozen or out of reach: nothing has come for the length of the rhythm
                since.
            OSError: the connection is broken.
        """
        header = self._read(_LENGTH.size, due_seconds)
        return self._seal.open(self._read(sealed_length(header)))

    def _read(self, count: int, due_seconds: float = 0.0) -> bytes:
        for turn in range(self.rhythm.turns):
            seconds = self.rhythm.turn_seconds + (0.0 if turn else due_seconds)
            with suppress(TimeoutError):
                self._fill(count, time.monotonic() + seconds)
                taken = bytes(self._buffer[:count])
                del self._buffer[:count]
                return taken
        raise self._silent()

    def _fill(self, count: int, deadline: float) -> None:
        """Wait until ``count`` bytes are there, and leave them there."""
        while len(self._buffer) < count:
            # At least a look: a process that was stopped finds its time run out, and the answer there.
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            received = self._socket.recv(_READ_BYTES)
            if not received:
                raise ConnectionResetError("the connection was closed")
            self._buffer += received

    def _silent(self) -> ClusterError:
        if self._is_here:
            return ClusterError(self.rhythm.frozen("the master"))
        return ClusterError(self.rhythm.unreachable(f"the master at {self._where}"))

    def close(self) -> None:
        self._socket.close()


class MasterChannel:
    """The master's side of a connection whose other side has proved the secret."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seal: Seal) -> None:
        self._reader = reader
        self._writer = writer
        self._seal = seal

    async def send(self, *parts: bytes) -> None:
        self._writer.write(self._seal.seal(parts))
        await self._writer.drain()

    async def receive(self) -> list[bytes]:
        """The next message; OSError or EOFError where the connection is broken."""
        length = sealed_length(await self._reader.readexactly(_LENGTH.size))
        return self._seal.open(await self._reader.readexactly(length))


async def welcome(connection: socket.socket, secret: Secret) -> Seal:
    """Shake hands with whoever has connected.

    Args:
        connection: which does not block.

    Raises:
        ChannelError: it does not have the secret; it is told so.
        OSError, EOFError: the connection is broken.
    """
    loop, own = asyncio.get_running_loop(), KeyPair()
    await loop.sock_sendall(connection, GREETING + own.public)
    answer = b""
    while missing := KEY_BYTES + PROOF_BYTES - len(answer):
        if not (received := await loop.sock_recv(connection, missing)):
            raise EOFError
        answer += received
    roles = answer[:KEY_BYTES]
    public_keys = own.public + roles
    if not hmac.compare_digest(answer[KEY_BYTES:], _proof(secret, "role", public_keys)):
        await loop.sock_sendall(connection, _REFUSAL)
        raise ChannelError("wrong secret")
    seal = Seal(secret, public_keys, own.agree(roles), "master")
    await loop.sock_sendall(connection, _proof(secret, "master", public_keys))
    return seal
