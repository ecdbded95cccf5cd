"""Connect each trainer to each worker, and authenticate both.

::

    trainer                                        worker
    ───────                                        ──────
                                       ◄────────   address (in the rendezvous store)
    connects                           ────────►
                                       ◄────────   random bytes, new for each connection
    index, random bytes, proof         ────────►   closes if the proof is wrong
                                       ◄────────   proof

A proof is an empty message, sealed as the first one of its direction. The key of a direction is derived from
the secret, the run, both names and the random bytes of both. So a recorded message is valid on no other
connection, even if the original never arrives.

Within a host, they connect by a Unix socket, and each sends with its proof a descriptor of the memory that it
lends to the other (``lent_blocks``). A worker stops listening once all trainers are connected.
"""

import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import psutil
import torch.distributed as dist

from hybrid.errors import ClusterError, first_line
from hybrid.security.closed_listeners import is_same_user
from hybrid.security.rejected_messages import RejectedMessage
from hybrid.security.sealed_stream import TAG_BYTES, Direction
from hybrid.security.secret import Secret
from hybrid.topology import Role, Topology
from hybrid.transport.shared_memory.lent_blocks import BorrowedMemory, LentMemory, MemoryPair, own_host
from hybrid.transport.socket.frames import FrameKind, Frames

_RANDOM_BYTES = 16
_HELLO = struct.Struct(f"<I{_RANDOM_BYTES}s{TAG_BYTES}s")  # index, random bytes, proof
_ATTEMPT_SECONDS = 5.0
_SECONDS_BETWEEN_ATTEMPTS = 0.05
# As many as connect within a tenth of a second at most: a trainer needs no more time for its proof.
MAX_UNAUTHENTICATED = 512

Accepted = TypeVar("Accepted")


class WorkerAddress(NamedTuple):
    """Where a worker listens.

    Attributes:
        host: see :func:`own_host`.
        name: of its Unix socket, in hexadecimal digits.
        interface, port: for other hosts.
    """

    host: str
    name: str
    interface: str
    port: int

    def __str__(self) -> str:
        return f"{self.interface}:{self.port}"

    def connect(self) -> socket.socket:
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
    """An authenticated connection, in non-blocking mode."""

    socket: socket.socket
    frames: Frames


@dataclass(frozen=True, slots=True)
class Identity:
    """What a role proves to the others.

    Attributes:
        run_id: random, new at each start of the cluster, and sent by the rendezvous.
        timeout_seconds: how long to wait for the others.
    """

    role: Role
    topology: Topology
    secret: Secret
    run_id: bytes
    timeout_seconds: float

    def directions(self, other: Role, random: bytes) -> tuple[Direction, Direction]:
        """Return the directions to and from another role, on the connection with these random bytes."""
        to, back = (
            self.secret.key(f"socket from {a.rpc_name} to {b.rpc_name}", self.run_id + random)
            for a, b in ((self.role, other), (other, self.role))
        )
        return Direction(to), Direction(back)


class Peer:
    """The other end of a connection, which is not authenticated yet.

    Args:
        nonce: bytes that an accepted peer has received.
    """

    def __init__(self, connection: socket.socket, nonce: bytes = b"") -> None:
        self.socket = connection
        self.nonce = nonce
        self.hello = b""
        self.descriptors: list[int] = []

    def receive(self, num_bytes: int) -> bool:
        """Receive up to ``num_bytes`` in all; whether all are there. OSError if no more will come."""
        missing = num_bytes - len(self.hello)
        if self.socket.family == socket.AF_UNIX:
            received, descriptors, _, _ = socket.recv_fds(self.socket, missing, 1)
            self.descriptors += descriptors
        else:
            received = self.socket.recv(missing)
        if not received:
            raise ConnectionResetError("it has closed the connection")
        self.hello += received
        return len(self.hello) == num_bytes

    def map_memory(self, lent: LentMemory | None) -> MemoryPair | None:
        """Return the memory of both ends, if both are on one host.

        Raises:
            RejectedMessage: the peer has sent none, or none of the right size.
        """
        if lent is None:
            return None
        if not self.descriptors:
            raise RejectedMessage("it lends no memory")
        try:
            return MemoryPair(lent, BorrowedMemory(self.descriptors[0]))
        except (OSError, ValueError) as error:
            raise RejectedMessage("it lends no memory of the right size") from error

    def close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())

    def close(self) -> None:
        self.close_descriptors()
        self.socket.close()


def accept_peers(
    listeners: Sequence[socket.socket],
    hello_bytes: int,
    accept: Callable[[Peer], tuple[int, Accepted]],
    expected: set[int],
    deadline: float,
    nonce_bytes: int = 0,
) -> dict[int, Accepted]:
    """Accept each expected peer once, until ``deadline`` at most.

    Unauthenticated peers are limited in number: a new one displaces the oldest. Each has sent ``hello_bytes``
    at most.

    Args:
        accept: called with a peer that has sent its hello; returns its index and a result, or raises
            RejectedMessage or OSError.
        nonce_bytes: random bytes that each peer gets first.

    Returns:
        The results by index.
    """
    accepted: dict[int, Accepted] = {}
    waiting: dict[object, Peer] = {}  # in the order of arrival
    with selectors.DefaultSelector() as selector:

        def forget(peer: Peer) -> None:
            selector.unregister(peer.socket)
            del waiting[peer.socket]

        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, listener)
        try:
            while accepted.keys() != expected and (seconds := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(seconds):
                    if key.data is not None:
                        if (peer := _accept_connection(key.data, nonce_bytes)) is not None:
                            waiting[peer.socket] = peer
                            selector.register(peer.socket, selectors.EVENT_READ)
                        if len(waiting) > MAX_UNAUTHENTICATED:
                            oldest = next(iter(waiting.values()))
                            forget(oldest)
                            oldest.close()
                    elif key.fileobj in waiting:  # else it was displaced
                        peer = waiting[key.fileobj]
                        try:
                            if not peer.receive(hello_bytes):
                                continue
                            index, result = accept(peer)
                        except (RejectedMessage, OSError):
                            forget(peer)
                            peer.close()
                        else:
                            forget(peer)
                            peer.close_descriptors()
                            accepted[index] = result
        finally:
            for peer in waiting.values():
                peer.close()
    return accepted


def _accept_connection(listener: socket.socket, nonce_bytes: int) -> Peer | None:
    try:
        connection, _ = listener.accept()
    except (ConnectionAbortedError, BlockingIOError):
        return None
    connection.setblocking(False)
    peer = Peer(connection, secrets.token_bytes(nonce_bytes))
    with suppress(OSError):
        if connection.family != socket.AF_UNIX or is_same_user(connection):
            if nonce_bytes:  # an accepted peer may have left already, and nothing is sent to it
                connection.send(peer.nonce)
            return peer
    connection.close()
    return None


def connect_to_workers(own: Identity, store: dist.Store) -> dict[Role, Connection]:
    """Return a trainer's connections to all workers.

    Args:
        store: in which the workers publish their addresses.

    Raises:
        ClusterError: a worker cannot be reached in time.
    """
    deadline = time.monotonic() + own.timeout_seconds
    connections: dict[Role, Connection] = {}
    for worker in own.topology.workers:
        address = WorkerAddress(*json.loads(store.get(worker.rpc_name)))
        while worker not in connections:
            try:
                connections[worker] = connect_to_worker(own, worker, address)
            except OSError as error:  # other peers may have displaced this one
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{own.role} cannot reach {worker} at {address}: {first_line(error)}"
                    ) from error
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
    return connections


def connect_to_worker(own: Identity, worker: Role, address: WorkerAddress) -> Connection:
    """Return a trainer's connection to a worker.

    Raises:
        OSError: nobody answers there.
        ClusterError: something else answers.
    """
    peer = Peer(address.connect())
    try:
        with _lend_memory(peer.socket) as lent:
            random = secrets.token_bytes(_RANDOM_BYTES)
            while not peer.receive(_RANDOM_BYTES):
                pass
            to, back = own.directions(worker, peer.hello + random)
            _send(peer.socket, _HELLO.pack(own.role.index, random, to.seal(b"")), lent)
            while not peer.receive(_RANDOM_BYTES + TAG_BYTES):
                pass
            back.open(peer.hello[_RANDOM_BYTES:])
            memory = peer.map_memory(lent)
    except RejectedMessage as error:
        peer.close()
        raise ClusterError(f"what listens at {address} is not {worker} of this run") from error
    except BaseException:
        peer.close()
        raise
    peer.close_descriptors()
    peer.socket.setblocking(False)
    return Connection(peer.socket, Frames(to, back, FrameKind.RESPONSE, FrameKind.FAILURE, memory=memory))


def accept_trainers(own: Identity, store: dist.Store, interface: str) -> list[Connection]:
    """Return a worker's connections to all trainers.

    Args:
        store: in which the worker publishes its address.
        interface: on which it listens for other hosts.

    Raises:
        ClusterError: a trainer does not connect in time.
    """
    trainers = own.topology.trainers
    connections: dict[int, Connection] = {}

    def accept(peer: Peer) -> tuple[int, Connection]:
        index, trainers_random, proof = _HELLO.unpack(peer.hello)
        if index >= len(trainers) or index in connections:
            raise RejectedMessage("this trainer is not expected")
        to, back = own.directions(trainers[index], peer.nonce + trainers_random)
        back.open(proof)
        with _lend_memory(peer.socket) as lent:
            if lent is None:
                peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            memory = peer.map_memory(lent)
            _send(peer.socket, to.seal(b""), lent)
        connections[index] = Connection(peer.socket, Frames(to, back, FrameKind.CALL, memory=memory))
        return index, connections[index]

    family, address = address_of(interface)
    with (
        socket.create_server((address, 0), family=family, backlog=MAX_UNAUTHENTICATED) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix_listener,
    ):
        unix_listener.bind("")  # Linux chooses a name
        unix_listener.listen(MAX_UNAUTHENTICATED)
        name = unix_listener.getsockname().hex()
        host, port = listener.getsockname()[:2]
        published = WorkerAddress(own_host(), name, host, port)
        store.set(own.role.rpc_name, json.dumps(published))
        deadline = time.monotonic() + own.timeout_seconds
        expected = {*range(len(trainers))}
        accept_peers((listener, unix_listener), _HELLO.size, accept, expected, deadline, _RANDOM_BYTES)
    if missing := [str(each) for each in trainers if each.index not in connections]:
        for connection in connections.values():
            connection.socket.close()
        raise ClusterError(f"not connected to {own.role} in time: {', '.join(missing)}")
    return [connections[each.index] for each in trainers]


def address_of(interface: str) -> tuple[socket.AddressFamily, str]:
    """Return family and IP address of an interface of this host; ClusterError if it has none."""
    found = {each.family: each.address for each in reversed(psutil.net_if_addrs()[interface])}
    for family in (socket.AF_INET, socket.AF_INET6):
        if family in found:
            return family, found[family]
    raise ClusterError(f"the interface {interface} has no address (cluster.interface)")


@contextmanager
def _lend_memory(connection: socket.socket) -> Iterator[LentMemory | None]:
    """Create memory for a peer on this host; its descriptor is closed at the end of the block."""
    if connection.family != socket.AF_UNIX:
        yield None
        return
    lent = LentMemory()
    try:
        yield lent
    finally:
        lent.close()


def _send(connection: socket.socket, message: bytes, lent: LentMemory | None) -> None:
    if lent is None:
        connection.sendall(message)
    else:
        socket.send_fds(connection, [message], [lent.descriptor])
