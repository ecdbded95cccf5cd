"""A master that is stopped before a role has met it: the system takes connections for it, nobody answers."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.commands import free_port
from support.rendezvous import ADDRESS, SECONDS

from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from workers.rendezvous import master_connection
from workers.rendezvous.address import Address
from workers.rendezvous.channel import GREETING, KEY_BYTES
from workers.rendezvous.heartbeat_interval import Rhythm
from workers.rendezvous.listener import listen
from workers.rendezvous.master_connection import connect

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
        with pytest.raises(ClusterError, match=FROZEN):
            connect(Address(ADDRESS, port), Secret.fresh(), Rhythm(TIMEOUT), SECONDS)


def words_for(address: Address) -> str:
    """Why nobody is found there."""
    with pytest.raises(ClusterError) as raised:
        connect(address, Secret.fresh(), Rhythm(0.01), 0.2)
    return str(raised.value)


HERE = socket.gethostname()


def test_one_who_is_not_there_yet_is_waited_for_however_short_the_timeout() -> None:
    port = free_port()
    why = "so nobody listens on that port there; start it, or check the port and its cluster.master_address"
    assert words_for(Address(ADDRESS, port)) == (
        f"no master at {ADDRESS}:{port} after 0.2 s: connection refused, {why}"
    )


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            f"host {HERE} knows no node0 (Name or service not known); check the name, or give its address",
        ),
        (
            OSError(errno.EHOSTUNREACH, "No route to host"),
            f"there is no way to it from host {HERE} (No route to host); check the address and the network",
        ),
        (
            TimeoutError("timed out"),
            f"nothing comes back to host {HERE}; check the address, and whether a firewall keeps out port 29",
        ),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
            f"connection refused (node0 is 127.0.1.1 on host {HERE}), so nobody listens on that port there; "
            "start it, or check the port and its cluster.master_address",
        ),
        (ConnectionResetError("gone"), "gone; start it, or check its log"),
    ],
    ids=["name", "route", "silence", "refused by a name", "anything else"],
)
def test_it_says_what_is_wrong(error: OSError, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    def find(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29))]

    monkeypatch.setattr(master_connection, "Channel", fail)
    monkeypatch.setattr(socket, "getaddrinfo", find)
    assert words_for(Address("node0", 29)) == f"no master at node0:29 after 0.2 s: {why}"
