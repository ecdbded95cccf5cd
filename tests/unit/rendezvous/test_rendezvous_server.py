"""Connections to the rendezvous, and the unauthenticated peers that it rejects."""

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
from support.commands import free_port
from unit.rendezvous.running import ADDRESS, SECONDS, OpenRendezvous, open_rendezvous

from hybrid.errors import ClusterError, ConfigError
from hybrid.security.secret import Secret
from workers.rendezvous import rendezvous_server, secure_channel
from workers.rendezvous.heartbeat import HeartbeatInterval
from workers.rendezvous.host_setup import MasterAddress, listen
from workers.rendezvous.secure_channel import (
    GREETING,
    KEY_BYTES,
    LARGEST_FRAME,
    PROOF_BYTES,
    Channel,
    ChannelError,
    FrameCipher,
    KeyPair,
    connect,
    sealed_length,
)

INTERVAL = HeartbeatInterval(SECONDS)
TIMEOUT = 0.3
MAX_PEERS = 20
HEADER = 4
PUBLIC_KEYS, AGREED = os.urandom(64), os.urandom(32)

PAYLOADS: dict[str, bytes] = {
    "nothing": b"",
    "half a proof": os.urandom(KEY_BYTES + PROOF_BYTES - 1),
    "a random proof": os.urandom(KEY_BYTES + PROOF_BYTES),
    "zeros, as the master rejects": bytes(KEY_BYTES + PROOF_BYTES),
    "many bytes": os.urandom(1 << 20),
    "a pickle": b"\x80\x04cos\nsystem\n\x8c\x08touch me\x85R.".ljust(KEY_BYTES + PROOF_BYTES),
}


@pytest.fixture(scope="module")
def opened() -> Iterator[OpenRendezvous]:
    with open_rendezvous() as each, each.store() as store:
        store.set("secret", "kept")
        yield each


def response_to(connection: socket.socket, sent: bytes) -> bytes:
    """Return all that the master sends to a peer that sends this and closes its side."""
    received = b""
    try:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(4096):
            received += more
    except OSError:  # the master has closed the connection
        pass
    return received


def check_that_roles_are_served(opened: OpenRendezvous) -> None:
    with opened.store() as store:
        assert store.get("secret") == b"kept"
    assert opened.lost == []


def ciphers(
    secret: Secret | None = None, public_keys: bytes = PUBLIC_KEYS, agreed: bytes = AGREED
) -> tuple[FrameCipher, FrameCipher]:
    """Return the ciphers of a role and of the master for one connection."""
    secret = secret or Secret.fresh()
    role = FrameCipher(secret, public_keys, agreed, "role")
    return role, FrameCipher(secret, public_keys, agreed, "master")


@pytest.mark.parametrize("fields", [[b"set", b"key", b"\0\xff" * 9], [b""], [], [bytes(100_000)]], ids=len)
def test_messages_arrive_unchanged_in_both_directions(fields: list[bytes]) -> None:
    role, master = ciphers()
    for sender, receiver in ((role, master), (master, role)):
        for _ in range(3):
            frame = sender.seal(fields)
            assert sealed_length(frame[:HEADER]) == len(frame) - HEADER
            assert receiver.open(frame[HEADER:]) == fields


def test_a_frame_is_valid_on_one_connection_and_direction() -> None:
    secret = Secret.fresh()
    role, master = ciphers(secret)
    frame = role.seal([b"set"])[HEADER:]
    others = [ciphers(secret)[0], *ciphers(secret, os.urandom(64)), *ciphers(secret, agreed=os.urandom(32))]
    for other in (*others, ciphers()[1]):
        with pytest.raises(ChannelError):
            other.open(frame)
    assert master.open(frame) == [b"set"]


def test_lengths_beyond_the_largest_frame_are_rejected() -> None:
    role, _ = ciphers()
    with pytest.raises(ValueError, match=f"at most {LARGEST_FRAME}"):
        role.seal([bytes(LARGEST_FRAME)])
    assert sealed_length((LARGEST_FRAME + 16).to_bytes(HEADER, "big")) == LARGEST_FRAME + 16
    for length in (LARGEST_FRAME + 17, 2**32 - 1):
        with pytest.raises(ChannelError):
            sealed_length(length.to_bytes(HEADER, "big"))


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31), b""], ids=["zeros", "one", "nothing"])
def test_invalid_public_keys_are_rejected(public: bytes) -> None:
    """An exchange with a point of small order results in zeros, which an attacker knows."""
    with pytest.raises(ChannelError):
        KeyPair().agree(public)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_an_unauthenticated_peer_gets_zeros_at_most(payload: bytes, opened: OpenRendezvous) -> None:
    with opened.connect_unauthenticated() as connection:
        assert response_to(connection, payload) in (b"", bytes(PROOF_BYTES))
    check_that_roles_are_served(opened)


def test_another_secret_is_reported_to_the_role(opened: OpenRendezvous) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.secret_file: .* HYBRID_SECRET"):
        Channel(ADDRESS, opened.port, Secret.fresh(), INTERVAL)


class Proxy:
    """A proxy between a role and the master, which records both and may change what the role sends."""

    def __init__(self, opened: OpenRendezvous, change: Callable[[bytes], bytes] = bytes) -> None:
        self.recorded = [b"", b""]  # from the role, from the master
        self._change = change
        self._listener = listen(ADDRESS, 0)
        self._master = socket.create_connection((ADDRESS, opened.port), timeout=SECONDS)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept).start()

    def request(self, secret: Secret, *fields: bytes) -> list[bytes]:
        """Send a request to the store through the proxy."""
        with closing(Channel(ADDRESS, self.port, secret, INTERVAL)) as channel:
            channel.send(b"store")
            channel.send(*fields)
            return channel.receive()

    def _accept(self) -> None:
        self._listener.settimeout(SECONDS)
        role, _ = self._listener.accept()
        back = threading.Thread(target=self._forward, args=(self._master, role, 1))
        back.start()
        self._forward(role, self._master, 0)
        back.join(SECONDS)
        for each in (role, self._master, self._listener):
            each.close()

    def _forward(self, source: socket.socket, target: socket.socket, direction: int) -> None:
        source.settimeout(SECONDS)
        try:
            while chunk := source.recv(4096):
                self.recorded[direction] += chunk
                target.sendall(chunk if direction else self._change(chunk))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_a_recorded_connection_reveals_and_opens_nothing(opened: OpenRendezvous) -> None:
    proxy = Proxy(opened)
    assert proxy.request(opened.secret, b"get", b"1", b"secret") == [b"done", b"kept"]
    for recorded in proxy.recorded:
        assert b"kept" not in recorded
        assert b"secret" not in recorded
    with opened.connect_unauthenticated() as connection:
        assert response_to(connection, proxy.recorded[0]) in (b"", bytes(PROOF_BYTES))
    check_that_roles_are_served(opened)


def test_a_leaked_secret_opens_no_old_frames(opened: OpenRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[KeyPair] = []

    class RecordedKeyPair(KeyPair):
        def __init__(self) -> None:
            super().__init__()
            pairs.append(self)

    monkeypatch.setattr(secure_channel, "KeyPair", RecordedKeyPair)
    proxy = Proxy(opened)
    proxy.request(opened.secret, b"get", b"1", b"secret")
    by_role, by_master = proxy.recorded
    masters = by_master.removeprefix(GREETING)[:KEY_BYTES]
    header = by_role[KEY_BYTES + PROOF_BYTES :][:HEADER]
    frame = by_role[KEY_BYTES + PROOF_BYTES + HEADER :][: sealed_length(header)]
    public_keys = masters + by_role[:KEY_BYTES]
    for agreed in (b"", bytes(32), masters, by_role[:KEY_BYTES], KeyPair().agree(masters)):
        with pytest.raises(ChannelError):
            FrameCipher(opened.secret, public_keys, agreed, "master").open(frame)
    own = next(each for each in pairs if each.public == by_role[:KEY_BYTES])
    assert FrameCipher(opened.secret, public_keys, own.agree(masters), "master").open(frame) == [b"store"]


@pytest.mark.parametrize("key", [os.urandom(KEY_BYTES), bytes(KEY_BYTES)], ids=["a key", "zeros"])
def test_a_replaced_public_key_is_rejected(key: bytes, opened: OpenRendezvous) -> None:
    replaced: list[bytes] = []

    def replace_key(chunk: bytes) -> bytes:
        if replaced:
            return chunk
        replaced.append(chunk)
        return key + chunk[KEY_BYTES:]

    with pytest.raises(ConfigError):
        Proxy(opened, replace_key).request(opened.secret, b"get", b"1", b"secret")
    check_that_roles_are_served(opened)


def test_an_altered_frame_ends_the_connection(opened: OpenRendezvous) -> None:
    seen = bytearray()

    def flip(chunk: bytes) -> bytes:
        seen.extend(chunk)
        return chunk if len(seen) <= KEY_BYTES + PROOF_BYTES else chunk[:-1] + bytes([chunk[-1] ^ 1])

    with pytest.raises(OSError, match=r"closed|reset"):
        Proxy(opened, flip).request(opened.secret, b"set", b"secret", b"changed")
    check_that_roles_are_served(opened)


@pytest.mark.parametrize(
    ("sent", "error", "message"),
    [
        (b"SSH-2.0-OpenSSH" + bytes(99), ClusterError, "version"),
        (GREETING + bytes(KEY_BYTES) + os.urandom(PROOF_BYTES), ConfigError, "secret"),
        (b"", ClusterError, "frozen"),
        (GREETING[:3], ClusterError, "frozen"),
        (GREETING, ClusterError, "frozen"),
        (GREETING + os.urandom(KEY_BYTES), ClusterError, "frozen"),
    ],
    ids=["another service", "no proof", "silence", "half a greeting", "no key", "no more"],
)
def test_a_listener_that_is_no_master_is_rejected(sent: bytes, error: type[Exception], message: str) -> None:
    with listen(ADDRESS, 0) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(SECONDS)
        address = MasterAddress(ADDRESS, listener.getsockname()[1])
        role = pool.submit(connect, address, Secret.fresh(), HeartbeatInterval(TIMEOUT), SECONDS)
        with listener.accept()[0] as connection:
            connection.sendall(sent)
            with pytest.raises(error, match=message):
                role.result(SECONDS)


def test_connect_waits_for_a_missing_master_and_names_the_reason() -> None:
    port, secret = free_port(), Secret.fresh()
    with pytest.raises(ClusterError, match=f"{ADDRESS}:{port} .*refused"):
        connect(MasterAddress(ADDRESS, port), secret, HeartbeatInterval(0.01), 0.2)


def test_temporary_errors_of_accept_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]
    accept = asyncio.SelectorEventLoop.sock_accept

    async def fail_first(
        loop: asyncio.SelectorEventLoop, listener: socket.socket
    ) -> tuple[socket.socket, Any]:
        if errors:
            raise OSError(error := errors.pop(), os.strerror(error))
        return await accept(loop, listener)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", fail_first)
    with open_rendezvous() as opened, opened.store() as store:
        store.set("secret", "kept")
        check_that_roles_are_served(opened)
    assert errors == []


def test_roles_are_served_among_many_others(opened: OpenRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """New peers displace the oldest of their address; peers of other addresses stay."""
    monkeypatch.setattr(rendezvous_server, "MAX_UNAUTHENTICATED", MAX_PEERS)
    with ExitStack() as stack:
        alone = stack.enter_context(opened.connect_unauthenticated(source="127.0.0.2"))
        peers = [stack.enter_context(opened.connect_unauthenticated()) for _ in range(3 * MAX_PEERS)]
        check_that_roles_are_served(opened)
        num_displaced = 0
        for peer in peers:
            peer.setblocking(False)
            try:
                num_displaced += peer.recv(1) == b""
            except BlockingIOError:
                pass
            except ConnectionResetError:
                num_displaced += 1
        assert num_displaced >= 2 * MAX_PEERS
        alone.setblocking(False)
        with pytest.raises(BlockingIOError):
            alone.recv(1)


def test_many_connections_wait_for_a_busy_master(opened: OpenRendezvous) -> None:
    with ExitStack() as stack, opened.frozen():
        for _ in range(500):
            stack.enter_context(socket.create_connection((ADDRESS, opened.port), timeout=SECONDS))


def test_a_silent_peer_is_disconnected(monkeypatch: pytest.MonkeyPatch, opened: OpenRendezvous) -> None:
    monkeypatch.setattr(rendezvous_server, "HANDSHAKE_SECONDS", 0.2)
    with opened.connect_unauthenticated() as connection:
        assert connection.recv(1) == b""
    with closing(opened.channel()) as channel, pytest.raises(OSError, match="closed"):
        channel.receive()  # the master waits for the purpose of the connection
