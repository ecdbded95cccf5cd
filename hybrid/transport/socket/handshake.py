"""What a trainer and a worker say to each other until each knows who the other is.

::

    trainer                                        worker
    ───────                                        ──────
    connects                           ◄────────   random bytes
    index, random bytes, proof         ────────►   closes where the proof is wrong
                                       ◄────────   proof

A proof is an empty message that is sealed with the first nonce of its direction. The key of each direction
comes of the secret, of the run, which the rendezvous has told its roles, of both names, and of the random
bytes of both; so nothing of one connection is good on another.

Within a host they connect by a socket of the system's own, and each sends with its proof the descriptor of
the memory that it lends the other (host_memory.py).
"""

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Self

from hybrid.errors import ClusterError
from hybrid.security.rejected_messages import RejectedMessage
from hybrid.security.sealed_stream import TAG_BYTES, Direction
from hybrid.security.secret import Secret
from hybrid.topology import Role, Topology
from hybrid.transport.socket.frames import Frames, Kind
from hybrid.transport.socket.lent_blocks import BorrowedMemory, HostMemory, LentMemory, own_host

_RANDOM_BYTES = 16
_HELLO = struct.Struct(f"<I{_RANDOM_BYTES}s{TAG_BYTES}s")  # index, random bytes, proof
_ATTEMPT_SECONDS = 5.0


class Address(NamedTuple):
    """Where a worker listens.

    Attributes:
        host: see :func:`own_host`.
        name: of the socket for those of its host, in hexadecimal digits.
        interface, port: for all others.
    """

    host: str
    name: str
    interface: str
    port: int

    def __str__(self) -> str:
        return f"{self.interface}:{self.port}"

    def connect(self) -> socket.socket:
        """A connection to it."""
        if self.host != own_host():
            connection = socket.create_connection((self.interface, self.port), _ATTEMPT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_ATTEMPT_SECONDS)
        try:
            connection.connect(bytes.fromhex(self.name))
        except BaseException:
            connection.close()
            raise
        return connection


class Connection(NamedTuple):
    """One whose two ends know each other; it does not block."""

    socket: socket.socket
    frames: Frames


@dataclass(frozen=True, slots=True)
class Place:
    """This process's, among the roles of a run.

    Attributes:
        run_id: drawn anew at each start of the cluster, and told by the rendezvous.
        timeout_seconds: how long to wait for the others.
    """

    role: Role
    topology: Topology
    secret: Secret
    run_id: bytes
    timeout_seconds: float

    def directions(self, other: Role, random: bytes) -> tuple[Direction, Direction]:
        """To another role, and from it, on the connection of these random bytes."""
        to, back = (
            self.secret.key(f"carrier from {a.rpc_name} to {b.rpc_name}", self.run_id + random)
            for a, b in ((self.role, other), (other, self.role))
        )
        return Direction(to), Direction(back)


def introduce(own: Place, worker: Role, address: Address) -> Connection:
    """A trainer's connection to a worker.

    Raises:
        OSError: nobody answers there.
        ClusterError: whoever does is not that worker.
    """
    connection = address.connect()
    try:
        with _Heard(connection) as heard, _lending(connection) as lent:
            random = secrets.token_bytes(_RANDOM_BYTES)
            to, back = own.directions(worker, heard.next(_RANDOM_BYTES) + random)
            _say(connection, _HELLO.pack(own.role.index, random, to.seal(b"")), lent)
            back.open(heard.next(TAG_BYTES))
            memory = heard.memory(lent)
    except RejectedMessage as error:
        connection.close()
        raise ClusterError(f"what listens at {address} is not {worker} of this run") from error
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return Connection(connection, Frames(to, back, Kind.ANSWER, Kind.FAILED, memory=memory))


@contextmanager
def _lending(connection: socket.socket) -> Iterator[LentMemory | None]:
    """Memory for the other end, where that is of the same host; its descriptor goes while this lasts."""
    if connection.family != socket.AF_UNIX:
        yield None
        return
    lent = LentMemory()
    try:
        yield lent
    finally:
        lent.close()


def _say(connection: socket.socket, said: bytes, lent: LentMemory | None) -> None:
    if lent is None:
        connection.sendall(said)
    else:
        socket.send_fds(connection, [said], [lent.descriptor])


class Visitor:
    """Whoever has connected to a worker, and has to prove that it is a trainer of the run.

    Args:
        connection: belongs to this now, until :meth:`let_in`.
    """

    def __init__(self, own: Place, connection: socket.socket) -> None:
        self._own = own
        self._connection = connection
        self._told = secrets.token_bytes(_RANDOM_BYTES)
        self._heard = _Heard(connection)
        self._directions: tuple[Direction, Direction]
        connection.setblocking(False)
        with suppress(OSError):  # gone, as shows when it is heard
            connection.send(self._told)

    def hear(self) -> int | None:
        """Take what has come; the trainer's index, once it has proved it.

        Raises:
            OSError: it is gone.
            RejectedMessage: it is no trainer of this run.
        """
        if not self._heard.more(_HELLO.size):
            return None
        index, random, proof = _HELLO.unpack(self._heard.said)
        if index >= self._own.topology.num_trainers:
            raise RejectedMessage("there is no such trainer")
        trainer = self._own.topology.trainers[index]
        self._directions = self._own.directions(trainer, self._told + random)
        self._directions[1].open(proof)
        return int(index)

    def let_in(self) -> Connection:
        """The connection, once it is known; this is not to be closed any more.

        Raises:
            OSError: it is gone.
            RejectedMessage: it lends no memory.
        """
        to, back = self._directions
        with self._heard, _lending(self._connection) as lent:
            if lent is None:
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            memory = self._heard.memory(lent)
            _say(self._connection, to.seal(b""), lent)
        return Connection(self._connection, Frames(to, back, Kind.CALL, memory=memory))

    def close(self) -> None:
        """Send it away."""
        self._heard.close()
        self._connection.close()


class _Heard:
    """What another process says until it is known; after a ``with``, no descriptor of its is left."""

    def __init__(self, connection: socket.socket) -> None:
        self.said = b""
        self._connection = connection
        self._descriptors: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptors."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def next(self, size: int) -> bytes:
        """The next ``size`` bytes, on a connection that blocks.

        Raises:
            OSError: they do not come.
        """
        self.said = b""
        while not self.more(size):
            pass
        return self.said

    def more(self, size: int) -> bool:
        """Take what has come, up to ``size`` bytes in all; whether these are there.

        Raises:
            OSError: nothing more will come.
        """
        missing = size - len(self.said)
        if self._connection.family == socket.AF_UNIX:
            came, descriptors, _, _ = socket.recv_fds(self._connection, missing, 1)
            self._descriptors += descriptors
        else:
            came = self._connection.recv(missing)
        if not came:
            raise ConnectionResetError("it has closed the connection")
        self.said += came
        return len(self.said) == size

    def memory(self, lent: LentMemory | None) -> HostMemory | None:
        """What both ends have now, where they are on one host.

        Raises:
            RejectedMessage: the other has sent none, or too little.
        """
        if lent is None:
            return None
        if not self._descriptors:
            raise RejectedMessage("it lends no memory")
        try:
            return HostMemory(lent, BorrowedMemory(self._descriptors[0]))
        except (OSError, ValueError) as error:
            raise RejectedMessage("what it lends is no memory of that size") from error
