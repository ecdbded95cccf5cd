"""A rendezvous in the test's own process, and roles and strangers that come to it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hybrid.errors import ClusterError, HybridError
from hybrid.security.secret import Secret
from hybrid.topology import Role, RoleKind, Topology
from workers.rendezvous.heartbeat import (
    Acceptance,
    HeartbeatInterval,
    HeartbeatSender,
    Registration,
    RegistrationPolicy,
    register,
)
from workers.rendezvous.master_address import listen
from workers.rendezvous.rendezvous_server import RendezvousServer
from workers.rendezvous.rendezvous_store import RendezvousStore
from workers.rendezvous.secure_channel import GREETING, KEY_BYTES, Channel

SECONDS = 5.0
ADDRESS = "127.0.0.1"
WORKER = Role(RoleKind.WORKER)
TOPOLOGY = Topology(2, 2)
ACCEPTANCE = Acceptance("", "there", "network", "lo")


class Quick(HeartbeatInterval):
    """Signs of life every 10 ms, of which thousands may be missing: a busy machine is not frozen."""

    @property
    def turns(self) -> int:
        return round(self.timeout_seconds / 0.01)


@dataclass
class Meeting:
    """A rendezvous that is open.

    Attributes:
        lost: what its master was told.
        heard: what its roles have found out.
    """

    rendezvous: RendezvousServer
    secret: Secret
    port: int
    interval: HeartbeatInterval
    lost: list[HybridError] = field(default_factory=list)
    heard: list[ClusterError] = field(default_factory=list)

    def channel(self, patience_seconds: float | None = None) -> Channel:
        """A connection of one who has the secret.

        Args:
            patience_seconds: how long the master may be silent from now on, where that is another time.
        """
        channel = Channel(ADDRESS, self.port, self.secret, self.interval)
        if patience_seconds is not None:
            channel.interval = HeartbeatInterval(patience_seconds)
        return channel

    @contextmanager
    def store(self, timeout_seconds: float = SECONDS) -> Iterator[RendezvousStore]:
        """A role's store."""
        store = RendezvousStore(self.channel, timeout_seconds)
        try:
            yield store
        finally:
            store.close()

    def pulse(self, role: Role = WORKER, patience_seconds: float | None = None) -> HeartbeatSender:
        """A role's heartbeats, after its registration."""
        channel = self.channel(patience_seconds)
        try:
            register(channel, Registration.of(role))
        except BaseException:
            channel.close()
            raise
        return HeartbeatSender(channel, self.heard.append)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The master does nothing for the length of a ``with`` block."""
        go_on = threading.Event()
        self.rendezvous._call_soon(go_on.wait, SECONDS)
        try:
            yield
        finally:
            go_on.set()

    def stranger(self, timeout_seconds: float = SECONDS, source: str = ADDRESS) -> socket.socket:
        """A connection, from an address of this machine, of one who was greeted and has said nothing yet."""
        connection = socket.create_connection((ADDRESS, self.port), timeout_seconds, (source, 0))
        greeting = connection.recv(len(GREETING) + KEY_BYTES, socket.MSG_WAITALL)
        assert greeting.startswith(GREETING)
        return connection


@contextmanager
def meeting(timeout_seconds: float | None = None, acceptance: Acceptance = ACCEPTANCE) -> Iterator[Meeting]:
    """An open rendezvous; its roles may be silent for so long, or for a minute, with frequent heartbeats."""
    interval = Quick(60.0) if timeout_seconds is None else HeartbeatInterval(timeout_seconds)
    secret, lost = Secret.fresh(), list[HybridError]()
    policy = RegistrationPolicy(TOPOLOGY, acceptance, lost.append)
    with listen(ADDRESS, 0) as listener:
        port = listener.getsockname()[1]
        with RendezvousServer(listener, secret, policy, interval, lost.append) as rendezvous:
            yield Meeting(rendezvous, secret, port, interval, lost)
