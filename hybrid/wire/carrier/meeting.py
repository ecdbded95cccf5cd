"""How trainers and workers connect, and prove to each other who they are.

::

    trainer                                        worker
    ───────                                        ──────
    (the store says where it listens)  ◄────────   listens on the cluster's interface
    connects                           ◄────────   random bytes
    index, random bytes, proof         ────────►   closes where the proof is wrong
                                       ◄────────   proof

A proof is an empty message that is sealed with the first nonce of its direction. The key of each direction
comes of the secret, of the run, which the rendezvous has told its roles, of both names, and of the random
bytes of both; so nothing of one connection is good on another. Once all trainers are there, nobody listens
any more.
"""

import json
import secrets
import selectors
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch.distributed as dist

from hybrid.errors import ClusterError, first_line
from hybrid.topology import Role, Topology
from hybrid.trust.direction import TAG_BYTES, Direction
from hybrid.trust.refusals import RefusedPayload
from hybrid.trust.secret import Secret
from hybrid.wire.carrier.frames import Frames, Kind

_RANDOM_BYTES = 16
_HELLO = struct.Struct(f"<I{_RANDOM_BYTES}s{TAG_BYTES}s")  # index, random bytes, proof
# As many as come within a tenth of a second at most: so long has a trainer to say who it is.
_MOST_STRANGERS = 512
_ATTEMPT_SECONDS = 5.0
_SECONDS_BETWEEN_ATTEMPTS = 0.05


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


def meet_workers(own: Place, store: dist.Store) -> dict[Role, Connection]:
    """A trainer's connections to all workers.

    Args:
        store: in which the workers say where they listen.

    Raises:
        ClusterError: one cannot be reached in time.
    """
    deadline = time.monotonic() + own.timeout_seconds
    met = {}
    for worker in own.topology.workers:
        address, port = json.loads(store.get(worker.rpc_name))
        met[worker] = _meet(own, worker, address, port, deadline)
    return met


def _meet(own: Place, worker: Role, address: str, port: int, deadline: float) -> Connection:
    while True:
        try:
            return _introduce(own, worker, address, port)
        except OSError as error:  # pushed out by strangers, it may be
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{own.role} cannot reach {worker} at {address}:{port}: {first_line(error)}"
                ) from error
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)


def _introduce(own: Place, worker: Role, address: str, port: int) -> Connection:
    connection = socket.create_connection((address, port), _ATTEMPT_SECONDS)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        random = secrets.token_bytes(_RANDOM_BYTES)
        to, back = own.directions(worker, _exactly(connection, _RANDOM_BYTES) + random)
        connection.sendall(_HELLO.pack(own.role.index, random, to.seal(b"")))
        back.open(_exactly(connection, TAG_BYTES))
    except RefusedPayload as error:
        connection.close()
        raise ClusterError(f"what listens at {address}:{port} is not {worker} of this run") from error
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return Connection(connection, Frames(to, back, Kind.ANSWER, Kind.FAILED))


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        if not (more := connection.recv(count - len(received))):
            raise ConnectionResetError("it has closed the connection")
        received += more
    return received


def meet_trainers(own: Place, store: dist.Store, interface: str) -> list[Connection]:
    """A worker's connections to all trainers.

    Args:
        store: in which it says where it listens.
        interface: on which.

    Raises:
        ClusterError: a trainer does not come in time.
    """
    family, address = _address_of(interface)
    with socket.create_server((address, 0), family=family, backlog=_MOST_STRANGERS) as listener:
        store.set(own.role.rpc_name, json.dumps(listener.getsockname()[:2]))
        with _Door(own, listener) as door:
            return door.let_in()


def _address_of(interface: str) -> tuple[socket.AddressFamily, str]:
    found = {each.family: each.address for each in reversed(psutil.net_if_addrs()[interface])}
    for family in (socket.AF_INET, socket.AF_INET6):
        if family in found:
            return family, found[family]
    raise ClusterError(f"the interface {interface} has no address (cluster.interface)")


class _Door:
    """Lets in each trainer once. Strangers get little time, and few of them are here at once."""

    def __init__(self, own: Place, listener: socket.socket) -> None:
        self._own = own
        self._listener = listener
        self._met: dict[int, Connection] = {}
        # What each visitor was told, and has said so far, in the order in which they came.
        self._visitors: dict[socket.socket, tuple[bytes, bytearray]] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Door":
        return self

    def __exit__(self, *_: object) -> None:
        for visitor in list(self._visitors):
            self._send_away(visitor)
        self._selector.close()

    def let_in(self) -> list[Connection]:
        """The connections of all trainers, once the last has come."""
        trainers = self._own.topology.trainers
        deadline = time.monotonic() + self._own.timeout_seconds
        while len(self._met) < len(trainers):
            if (left := deadline - time.monotonic()) <= 0:
                missing = ", ".join(str(each) for each in trainers if each.index not in self._met)
                for connection in self._met.values():
                    connection.socket.close()
                raise ClusterError(f"not connected to {self._own.role} in time: {missing}")
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._welcome()
                elif key.fileobj in self._visitors:  # else sent away in this turn
                    self._hear(key.fileobj)
        return [self._met[each.index] for each in trainers]

    def _welcome(self) -> None:
        try:
            visitor, _ = self._listener.accept()
        except ConnectionAbortedError:
            return
        random = secrets.token_bytes(_RANDOM_BYTES)
        visitor.setblocking(False)
        self._visitors[visitor] = random, bytearray()
        self._selector.register(visitor, selectors.EVENT_READ)
        with suppress(OSError):  # gone, as shows when it is heard
            visitor.send(random)
        if len(self._visitors) > _MOST_STRANGERS:
            self._send_away(next(iter(self._visitors)))

    def _hear(self, visitor: socket.socket) -> None:
        random, said = self._visitors[visitor]
        try:
            more = visitor.recv(_HELLO.size - len(said))
        except OSError:
            more = b""
        said += more
        if len(said) == _HELLO.size and (met := self._known(visitor, random, said)):
            del self._visitors[visitor]
            self._selector.unregister(visitor)
            self._met[met[0]] = met[1]
        elif len(said) == _HELLO.size or not more:
            self._send_away(visitor)

    def _known(self, visitor: socket.socket, told: bytes, said: bytearray) -> tuple[int, Connection] | None:
        """The trainer who has said this, where it is one that has not come yet; it is answered."""
        index, random, proof = _HELLO.unpack(said)
        if index in self._met or index >= self._own.topology.num_trainers:
            return None
        to, back = self._own.directions(self._own.topology.trainers[index], told + random)
        try:
            back.open(proof)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            visitor.send(to.seal(b""))
        except (RefusedPayload, OSError):
            return None
        return index, Connection(visitor, Frames(to, back, Kind.CALL))

    def _send_away(self, visitor: socket.socket) -> None:
        del self._visitors[visitor]
        self._selector.unregister(visitor)
        visitor.close()
