"""A rendezvous in the process of the test, and roles and unauthenticated peers that connect to it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.errors import ClusterError, HybridError
from hybrid.security.secret import Secret
from hybrid.topology import Role, RoleKind
from workers.rendezvous.bootstrap import RendezvousStore
from workers.rendezvous.heartbeat import HeartbeatInterval, HeartbeatSender, Registration, register
from workers.rendezvous.host_setup import listen
from workers.rendezvous.rendezvous_server import RendezvousServer
from workers.rendezvous.secure_channel import GREETING, KEY_BYTES, Channel

SECONDS = 5.0
ADDRESS = "127.0.0.1"
WORKER = Role(RoleKind.WORKER)
CONFIG = load_config(None, ["cluster.trainers=2", "cluster.workers=2"])


def registration(role: Role = WORKER, host: str = "here") -> Registration:
    """Return the registration of this process as a role."""
    return Registration(str(role), "files", "network", host)


class Quick(HeartbeatInterval):
    """Heartbeats every 10 ms, of which thousands may be missing, so a busy process is not frozen."""

    @property
    def turns(self) -> int:
        return round(self.timeout_seconds / 0.01)


@dataclass
class OpenRendezvous:
    """An open rendezvous.

    Attributes:
        lost: errors that its master reports.
        failures: errors that its roles report.
    """

    rendezvous: RendezvousServer
    secret: Secret
    port: int
    interval: HeartbeatInterval
    lost: list[HybridError] = field(default_factory=list)
    failures: list[ClusterError] = field(default_factory=list)

    def channel(self, silence_seconds: float | None = None) -> Channel:
        """Connect with the secret.

        Args:
            silence_seconds: how long the master may be silent after the handshake; None for the usual time.
        """
        channel = Channel(ADDRESS, self.port, self.secret, self.interval)
        if silence_seconds is not None:
            channel.interval = HeartbeatInterval(silence_seconds)
        return channel

    def store(self, timeout_seconds: float = SECONDS) -> closing[RendezvousStore]:
        """A role's store."""
        return closing(RendezvousStore(self.channel, timeout_seconds))

    def heartbeats(self, role: Role = WORKER, silence_seconds: float | None = None) -> HeartbeatSender:
        """A role's heartbeats, after its registration."""
        channel = self.channel(silence_seconds)
        try:
            register(channel, registration(role))
        except BaseException:
            channel.close()
            raise
        return HeartbeatSender(channel, self.failures.append)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the master for the length of a ``with`` block."""
        go_on = threading.Event()
        self.rendezvous._call_soon(go_on.wait, SECONDS)
        try:
            yield
        finally:
            go_on.set()

    def connect_unauthenticated(
        self, timeout_seconds: float = SECONDS, source: str = ADDRESS
    ) -> socket.socket:
        """Connect from an address of this machine, and receive the greeting and key of the master."""
        connection = socket.create_connection((ADDRESS, self.port), timeout_seconds, (source, 0))
        greeting = connection.recv(len(GREETING) + KEY_BYTES, socket.MSG_WAITALL)
        assert greeting.startswith(GREETING)
        return connection


@contextmanager
def open_rendezvous(
    timeout_seconds: float | None = None, config: RunConfig = CONFIG
) -> Iterator[OpenRendezvous]:
    """Open a rendezvous; ``timeout_seconds`` None means frequent heartbeats, and a minute of silence."""
    interval = Quick(60.0) if timeout_seconds is None else HeartbeatInterval(timeout_seconds)
    cluster = replace(config.cluster, heartbeat_timeout_seconds=interval.timeout_seconds)
    secret, lost = Secret.fresh(), list[HybridError]()
    with listen(ADDRESS, 0) as listener:
        port = listener.getsockname()[1]
        with RendezvousServer(listener, secret, replace(config, cluster=cluster), lost.append) as rendezvous:
            yield OpenRendezvous(rendezvous, secret, port, interval, lost)
