"""Connections with the secret: what is read on them is what the other side has written, and nothing else."""

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
from workers.rendezvous import secure_channel
from workers.rendezvous.heartbeat import HeartbeatInterval
from workers.rendezvous.master_address import MasterAddress, listen
from workers.rendezvous.secure_channel import (
    GREETING,
    KEY_BYTES,
    LARGEST_FRAME,
    ChannelError,
    FrameCipher,
    KeyPair,
    connect,
    sealed_length,
)

PUBLIC_KEYS, AGREED = os.urandom(64), os.urandom(32)
HEADER = 4


def pair(
    secret: Secret | None = None, public_keys: bytes = PUBLIC_KEYS, agreed: bytes = AGREED
) -> tuple[FrameCipher, FrameCipher]:
    secret = secret or Secret.fresh()
    return FrameCipher(secret, public_keys, agreed, "role"), FrameCipher(
        secret, public_keys, agreed, "master"
    )


@pytest.mark.parametrize("parts", [[b"set", b"key", b"\0\xff" * 9], [b""], [], [bytes(100_000)]], ids=len)
def test_messages_arrive_unchanged_in_both_directions(parts: list[bytes]) -> None:
    role, master = pair()
    for sender, receiver in ((role, master), (master, role)):
        for _ in range(3):
            frame = sender.seal(parts)
            assert sealed_length(frame[:HEADER]) == len(frame) - HEADER
            assert receiver.open(frame[HEADER:]) == parts


def test_a_message_is_valid_on_one_connection_and_direction() -> None:
    secret = Secret.fresh()
    role, master = pair(secret)
    frame = role.seal([b"set"])[HEADER:]
    others = [pair(secret)[0], *pair(secret, os.urandom(64)), *pair(secret, agreed=os.urandom(32)), pair()[1]]
    for other in others:
        with pytest.raises(ChannelError):
            other.open(frame)
    assert master.open(frame) == [b"set"]


def test_lengths_beyond_the_largest_frame_are_rejected() -> None:
    role, _ = pair()
    with pytest.raises(ValueError, match=f"at most {LARGEST_FRAME}"):
        role.seal([bytes(LARGEST_FRAME)])
    assert sealed_length((LARGEST_FRAME + 16).to_bytes(HEADER, "big")) == LARGEST_FRAME + 16
    for length in (LARGEST_FRAME + 17, 2**32 - 1):
        with pytest.raises(ChannelError, match=f"a frame of {length} bytes"):
            sealed_length(length.to_bytes(HEADER, "big"))


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31), b""], ids=["zeros", "one", "nothing"])
def test_invalid_public_keys_are_rejected(public: bytes) -> None:
    """With points of small order everybody comes to zeros, which everybody knows."""
    with pytest.raises(ChannelError, match="no public key"):
        KeyPair().agree(public)


TIMEOUT = 0.3
FROZEN = rf"^the master is frozen: no heartbeat for {TIMEOUT} s \(cluster.heartbeat_timeout_seconds\)$"


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
def test_a_silent_listener_is_frozen_after_the_timeout(said: bytes) -> None:
    with stopped_after(said) as port:
        with pytest.raises(ClusterError, match=FROZEN):
            connect(MasterAddress(ADDRESS, port), Secret.fresh(), HeartbeatInterval(TIMEOUT), SECONDS)


def words_for(address: MasterAddress) -> str:
    """Why nobody is found there."""
    with pytest.raises(ClusterError) as raised:
        connect(address, Secret.fresh(), HeartbeatInterval(0.01), 0.2)
    return str(raised.value)


HERE = socket.gethostname()


def test_connect_waits_for_a_missing_master() -> None:
    port = free_port()
    why = "so nobody listens on that port there; start it, or check the port and its cluster.master"
    assert words_for(MasterAddress(ADDRESS, port)) == (
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
            f"host {HERE} has no route to it (No route to host); check the address and the network",
        ),
        (
            TimeoutError("timed out"),
            f"nothing comes back to host {HERE}; check the address, and whether a firewall blocks port 29",
        ),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
            f"connection refused (node0 is 127.0.1.1 on host {HERE}), so nobody listens on that port there; "
            "start it, or check the port and its cluster.master",
        ),
        (ConnectionResetError("gone"), "gone; start it, or check its log"),
    ],
    ids=["name", "route", "silence", "refused by a name", "anything else"],
)
def test_connection_errors_are_explained(error: OSError, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    def find(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29))]

    monkeypatch.setattr(secure_channel, "Channel", fail)
    monkeypatch.setattr(socket, "getaddrinfo", find)
    assert words_for(MasterAddress("node0", 29)) == f"no master at node0:29 after 0.2 s: {why}"
