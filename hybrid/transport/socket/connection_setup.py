"""How trainers and workers find each other.

A worker says in the store where it listens, on the cluster's interface and within its host. Each trainer
connects to each worker, and both prove who they are (introduction.py). Once all trainers are there, nobody
listens any more.
"""

import json
import selectors
import socket
import time
from collections.abc import Sequence

import psutil
import torch.distributed as dist

from hybrid.errors import ClusterError, first_line
from hybrid.security.closed_listeners import is_same_user
from hybrid.security.rejected_messages import RejectedMessage
from hybrid.topology import Role
from hybrid.transport.socket.handshake import Address, Connection, Place, Visitor, introduce
from hybrid.transport.socket.lent_blocks import own_host

# As many as come within a tenth of a second at most: so long has a trainer to say who it is.
_MOST_STRANGERS = 512
_SECONDS_BETWEEN_ATTEMPTS = 0.05


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
        met[worker] = _meet(own, worker, Address(*json.loads(store.get(worker.rpc_name))), deadline)
    return met


def _meet(own: Place, worker: Role, address: Address, deadline: float) -> Connection:
    while True:
        try:
            return introduce(own, worker, address)
        except OSError as error:  # pushed out by strangers, it may be
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{own.role} cannot reach {worker} at {address}: {first_line(error)}"
                ) from error
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)


def meet_trainers(own: Place, store: dist.Store, interface: str) -> list[Connection]:
    """A worker's connections to all trainers.

    Args:
        store: in which it says where it listens.
        interface: on which.

    Raises:
        ClusterError: a trainer does not come in time.
    """
    family, address = address_of(interface)
    with (
        socket.create_server((address, 0), family=family, backlog=_MOST_STRANGERS) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as of_host,
    ):
        of_host.bind("")  # Linux chooses a name
        of_host.listen(_MOST_STRANGERS)
        where = Address(own_host(), of_host.getsockname().hex(), *listener.getsockname()[:2])
        store.set(own.role.rpc_name, json.dumps(where))
        with _Door(own, (listener, of_host)) as door:
            return door.let_in()


def address_of(interface: str) -> tuple[socket.AddressFamily, str]:
    """The address of an interface of this host, and of what family; ClusterError where it has none."""
    found = {each.family: each.address for each in reversed(psutil.net_if_addrs()[interface])}
    for family in (socket.AF_INET, socket.AF_INET6):
        if family in found:
            return family, found[family]
    raise ClusterError(f"the interface {interface} has no address (cluster.interface)")


class _Door:
    """Lets in each trainer once. Strangers get little time, and few of them are here at once."""

    def __init__(self, own: Place, listeners: Sequence[socket.socket]) -> None:
        self._own = own
        self._met: dict[int, Connection] = {}
        self._visitors: dict[socket.socket, Visitor] = {}  # in the order in which they came
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, listener)

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
                if key.data is not None:
                    self._welcome(key.data)
                elif key.fileobj in self._visitors:  # else sent away in this turn
                    self._hear(key.fileobj)
        return [self._met[each.index] for each in trainers]

    def _welcome(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:
            return
        if connection.family == socket.AF_UNIX and not is_same_user(connection):
            connection.close()
            return
        self._visitors[connection] = Visitor(self._own, connection)
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._visitors) > _MOST_STRANGERS:
            self._send_away(next(iter(self._visitors)))

    def _hear(self, connection: socket.socket) -> None:
        visitor = self._visitors[connection]
        try:
            if (index := visitor.hear()) is None:
                return
            if index in self._met:
                self._send_away(connection)
                return
            self._met[index] = visitor.let_in()
        except (RejectedMessage, OSError):
            self._send_away(connection)
        else:
            del self._visitors[connection]
            self._selector.unregister(connection)

    def _send_away(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._visitors.pop(connection).close()
