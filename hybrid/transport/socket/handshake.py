"""Connect each trainer to each worker, with mutual authentication.

::

    trainer                                        worker
    ───────                                        ──────
                                       ◄────────   address (in the rendezvous store)
    connects                           ────────►
                                       ◄────────   random bytes, new for each connection
    index, random bytes, proof         ────────►   closes if the proof is wrong
                                       ◄────────   proof

A proof is an empty message, encrypted as the first message of its direction. The key of a direction depends
on the secret, random bytes of the run, the names of both roles, and the random bytes that both roles sent. So
a recorded message is valid on no other connection. The run's random bytes come from the rendezvous, which has
forward secrecy. So the secret alone does not decrypt a recorded connection.

Within a host, trainer and worker connect by a Unix socket. With the proof, the trainer sends a descriptor of
shared memory for large tensors (``tensor_blocks``). A worker stops listening once all trainers are connected.
"""

import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from hybrid.errors import ClusterError, first_line
from hybrid.security.rejections import RejectionError
from hybrid.security.secret import TAG_BYTES, DirectionCipher, Secret
from hybrid.shared_memory.tensor_blocks import MemoryPair, create_memory, host_id
from hybrid.topology import Role, Topology
from hybrid.transport.socket.frames import FrameKind, Frames

_RANDOM_BYTES = 16
_HELLO = struct.Struct(f"<I{_RANDOM_BYTES}s{TAG_BYTES}s")  # index, random bytes, proof
_ATTEMPT_SECONDS = 5.0
_SECONDS_BETWEEN_ATTEMPTS = 0.05
# A flood takes 0.1 s to open so many connections. A trainer sends its proof sooner, and is not displaced.
MAX_UNAUTHENTICATED = 512


def send_bursts_at_once(connection: socket.socket) -> None:
    """Make a socket send small messages without delay, and the packets of a message without pauses.

    BBR, the congestion control of some hosts, spreads packets over a round trip, which can double the time
    of a message and its response. So this function selects CUBIC or Reno instead.

    Args:
        connection: a socket that listens or is not connected yet. On a connected socket, BBR's pauses remain.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name in (b"cubic", b"reno"):
        with suppress(OSError):  # the kernel lacks it, or allows it to root only
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            break


class WorkerAddress(NamedTuple):
    """The addresses on which a worker listens."""

    host: str  # the worker's host_id()
    name: str  # name of the Unix socket for this host, in hexadecimal digits
    interface: str  # IP address for other hosts
    port: int

    def __str__(self) -> str:
        return f"{self.interface}:{self.port}"

    def connect(self) -> socket.socket:
        """Connect by a Unix socket within a host, else by TCP; OSError on failure, or after five seconds."""
        if self.host == host_id():
            connection = socket.socket(socket.AF_UNIX)
            address: Any = bytes.fromhex(self.name)
        else:
            (family, *_, address), *_ = socket.getaddrinfo(self.interface, self.port, type=socket.SOCK_STREAM)
            connection = socket.socket(family)
            send_bursts_at_once(connection)
        connection.settimeout(_ATTEMPT_SECONDS)
        try:
            connection.connect(address)
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
    """A role, and the secret by which it authenticates itself."""

    role: Role
    topology: Topology
    secret: Secret
    run_id: bytes  # random bytes of the rendezvous, new at each start of the cluster
    timeout_seconds: float  # how long to wait for other roles

    def directions(self, other: Role, random: bytes) -> tuple[DirectionCipher, DirectionCipher]:
        """Return ciphers to and from ``other``. ``random``: the worker's random bytes, then the trainer's."""
        own, peer, context = self.role.rpc_name, other.rpc_name, self.run_id + random
        to = self.secret.key(f"socket from {own} to {peer}", context)
        back = self.secret.key(f"socket from {peer} to {own}", context)
        return DirectionCipher(to), DirectionCipher(back)


class _Peer:
    """A peer that has connected to a worker, but has not yet proved that it is a trainer."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.nonce = secrets.token_bytes(_RANDOM_BYTES)
        self._hello = b""
        self._descriptors: list[int] = []

    def receive(self) -> bool:
        """Receive bytes of the first message; return whether it is complete. OSError if disconnected."""
        missing = _HELLO.size - len(self._hello)
        received, descriptors, _, _ = socket.recv_fds(self.socket, missing, 1)
        self._descriptors += descriptors
        if not received:
            raise ConnectionResetError
        self._hello += received
        return len(self._hello) == _HELLO.size

    def authenticate(self, own: Identity, connected: Collection[Role]) -> tuple[Role, Connection]:
        """Verify the proof in the peer's first message; send a proof; return the trainer and the connection.

        Raises:
            RejectionError: the proof is wrong, or the trainer is in ``connected``.
            OSError, ValueError, IndexError: the index or the shared memory is invalid, or the peer is gone.
        """
        index, random, proof = _HELLO.unpack(self._hello)
        trainer = own.topology.trainers[index]
        to, back = own.directions(trainer, self.nonce + random)
        back.open(proof)
        if trainer in connected:
            raise RejectionError("this trainer is connected already")
        memory = None
        if self.socket.family == socket.AF_UNIX:
            memory = MemoryPair.map(self._descriptors[0], writes_first_half=False)
        self.socket.sendall(to.seal(b""))
        return trainer, Connection(self.socket, Frames(to, back, FrameKind.CALL, memory=memory))

    def close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def close(self) -> None:
        self.close_descriptors()
        self.socket.close()


def connect_to_workers(own: Identity, store: dist.Store) -> dict[Role, Connection]:
    """Connect a trainer to all workers, whose addresses are in ``store``; return the connections.

    Raises:
        ClusterError: a worker is not reached within the timeout, or another program responds at its address.
        RuntimeError: a worker publishes no address within the timeout of ``store``.
    """
    connections: dict[Role, Connection] = {}
    for worker in own.topology.workers:
        address = WorkerAddress(*json.loads(store.get(worker.rpc_name)))
        deadline = time.monotonic() + own.timeout_seconds
        while worker not in connections:
            try:
                connections[worker] = connect_to_worker(own, worker, address)
            except OSError as error:  # the worker may have closed it to accept newer peers
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{own.role} cannot reach {worker} at {address}: {first_line(error)}"
                    ) from error
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
    return connections


def connect_to_worker(own: Identity, worker: Role, address: WorkerAddress) -> Connection:
    """Connect to a worker; OSError if no process responds, ClusterError if another program responds."""
    memory = None
    with ExitStack() as stack:
        connection = stack.enter_context(address.connect())
        random = secrets.token_bytes(_RANDOM_BYTES)
        to, back = own.directions(worker, _receive(connection, _RANDOM_BYTES) + random)
        hello = _HELLO.pack(own.role.index, random, to.seal(b""))
        if connection.family == socket.AF_UNIX:
            descriptor = create_memory(MemoryPair.NUM_BYTES)
            try:
                memory = MemoryPair.map(descriptor, writes_first_half=True)
                socket.send_fds(connection, [hello], [descriptor])
            finally:
                os.close(descriptor)
        else:
            connection.sendall(hello)
        try:
            back.open(_receive(connection, TAG_BYTES))
        except RejectionError as error:
            raise ClusterError(
                f"the process that listens at {address} is not {worker} of this run"
            ) from error
        stack.pop_all()
    connection.setblocking(False)
    return Connection(connection, Frames(to, back, FrameKind.RESPONSE, FrameKind.FAILURE, memory=memory))


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        more = connection.recv(num_bytes - len(received))
        if not more:
            raise ConnectionResetError("the connection was closed")
        received += more
    return received


def accept_trainers(own: Identity, store: dist.Store, interface: str) -> list[Connection]:
    """As a worker, accept the connections of all trainers; return them in the order of the trainers.

    If more than ``MAX_UNAUTHENTICATED`` peers have not sent a proof, the oldest of them is disconnected.

    Args:
        store: the store in which the worker publishes its address.
        interface: network interface on which the worker listens for other hosts.

    Raises:
        ClusterError: a trainer does not connect in time, or ``interface`` has no address.
    """
    trainers = own.topology.trainers
    connections: dict[Role, Connection] = {}
    peers: dict[object, _Peer] = {}  # in the order of arrival
    family, address = address_of(interface)
    with ExitStack() as stack:
        listener = socket.create_server((address, 0), family=family, backlog=MAX_UNAUTHENTICATED)
        send_bursts_at_once(listener)  # and the connections that it accepts
        unix_listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listeners = [stack.enter_context(each) for each in (listener, unix_listener)]
        selector = stack.enter_context(selectors.DefaultSelector())
        unix_listener.bind("")  # Linux chooses a name
        unix_listener.listen(MAX_UNAUTHENTICATED)
        for each in listeners:
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ)
        published = WorkerAddress(host_id(), unix_listener.getsockname().hex(), *listener.getsockname()[:2])
        store.set(own.role.rpc_name, json.dumps(published))
        deadline = time.monotonic() + own.timeout_seconds

        def forget(peer: _Peer) -> _Peer:
            selector.unregister(peer.socket)
            return peers.pop(peer.socket)

        while len(connections) < len(trainers) and (seconds := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(seconds):
                if key.fileobj in listeners:
                    with suppress(ConnectionAbortedError, BlockingIOError):
                        peer = _Peer(listeners[listeners.index(key.fileobj)].accept()[0])
                        peers[peer.socket] = peer
                        selector.register(peer.socket, selectors.EVENT_READ)
                        peer.socket.setblocking(False)
                        with suppress(OSError):  # the peer may have closed it
                            peer.socket.send(peer.nonce)
                    if len(peers) > MAX_UNAUTHENTICATED:
                        forget(next(iter(peers.values()))).close()
                elif (waiting := peers.get(key.fileobj)) is not None:  # else the peer was disconnected above
                    try:
                        if not waiting.receive():
                            continue
                        trainer, connection = waiting.authenticate(own, connections)
                    except (RejectionError, OSError, ValueError, IndexError):
                        forget(waiting).close()
                    else:
                        forget(waiting).close_descriptors()
                        connections[trainer] = connection
    for peer in peers.values():
        peer.close()
    missing = [str(each) for each in trainers if each not in connections]
    if missing:
        for connection in connections.values():
            connection.socket.close()
        raise ClusterError(f"did not connect to {own.role} in time: {', '.join(missing)}")
    return [connections[each] for each in trainers]


def address_of(interface: str) -> tuple[socket.AddressFamily, str]:
    """Return family and IP address of an interface, IPv4 first; ClusterError if it has no address."""
    addresses = {each.family: each.address for each in reversed(psutil.net_if_addrs()[interface])}
    for family in (socket.AF_INET, socket.AF_INET6):
        if family in addresses:
            return family, addresses[family]
    raise ClusterError(f"the interface {interface} has no address (cluster.interface)")
