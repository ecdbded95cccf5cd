"""A master that is stopped before a role has met it: the system takes connections for it, nobody answers."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.commands import free_port
from support.rendezvous import ADDRESS, SECONDS

from hybrid.config import ClusterSection
from hybrid.errors import ClusterError
from hybrid.trust.secret import Secret
from workers.joining.bootstrap import _connect
from workers.joining.channel import GREETING, KEY_BYTES
from workers.joining.listener import listen
from workers.joining.rhythm import Rhythm

TIMEOUT = 0.3
FROZEN = rf"^the master is frozen: no sign of life for {TIMEOUT} s \(cluster.heartbeat_timeout_seconds\)$"


@contextmanager
def stopped_after(said: bytes) -> Iterator[int]:
    """The port of somebody who says this to the first who comes, and then nothing to anybody."""

    def greet() -> None:
        connections.append(listener.accept()[0])
        connections[0].sendall(said)

    connections: list[socket.socket] = []
    with listen(ADDRESS, 0) as listener:
        listener.settimeout(SECONDS)
        if said:
            threading.Thread(target=greet).start()
        yield listener.getsockname()[1]
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    "said",
    [b"", GREETING[:3], GREETING, GREETING + os.urandom(KEY_BYTES)],
    ids=["nothing", "half a greeting", "no nonce", "no proof"],
)
def test_one_who_is_there_and_silent_is_frozen_after_the_timeout(said: bytes) -> None:
    with stopped_after(said) as port:
        section = ClusterSection(master_address=ADDRESS, master_port=port)
        with pytest.raises(ClusterError, match=FROZEN):
            _connect(section, Secret.fresh(), Rhythm(TIMEOUT))


def test_one_who_is_not_there_yet_is_waited_for_however_short_the_timeout() -> None:
    port = free_port()
    section = ClusterSection(master_address=ADDRESS, master_port=port, start_timeout_seconds=0.2)
    with pytest.raises(ClusterError) as raised:
        _connect(section, Secret.fresh(), Rhythm(0.01))
    assert str(raised.value) == (
        f"no master at {ADDRESS}:{port} after 0.2 s ([Errno 111] Connection refused); start it, or check "
        "cluster.master_address and cluster.master_port"
    )
