"""Strangers at the rendezvous: nobody without the secret is let in, held for long, or remembered."""

import asyncio
import errno
import os
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
from support.rendezvous import ADDRESS, SECONDS, Meeting, meeting

from hybrid.errors import ClusterError, ConfigError
from hybrid.security.secret import Secret
from workers.rendezvous import rendezvous_server, secure_channel
from workers.rendezvous.heartbeat import HeartbeatInterval
from workers.rendezvous.master_address import listen
from workers.rendezvous.secure_channel import (
    GREETING,
    KEY_BYTES,
    PROOF_BYTES,
    Channel,
    ChannelError,
    FrameCipher,
    KeyPair,
    sealed_length,
)

RHYTHM = HeartbeatInterval(SECONDS)
MOST_STRANGERS = 20

# What there is to send: nothing of it proves anything.
PAYLOADS: dict[str, bytes] = {
    "nothing": b"",
    "half a proof": os.urandom(KEY_BYTES + PROOF_BYTES - 1),
    "a random proof": os.urandom(KEY_BYTES + PROOF_BYTES),
    "zeros, as the master refuses": bytes(KEY_BYTES + PROOF_BYTES),
    "much more": os.urandom(1 << 20),
    "a huge length": b"\xff" * 4096,
    "a pickle": b"\x80\x04cos\nsystem\n\x8c\x08touch me\x85R.".ljust(KEY_BYTES + PROOF_BYTES),
    "a question of torch's store": b"\x00\x3d\x4f\xfa\xf5" + bytes(200),
    "a page": b"GET / HTTP/1.1\r\nHost: master\r\n\r\n",
}


@pytest.fixture(scope="module")
def opened() -> Iterator[Meeting]:
    with meeting() as each, each.store() as store:
        store.set("secret", "kept")
        yield each


def heard_after(connection: socket.socket, sent: bytes) -> bytes:
    """All that the master says to one who sends this and then no more."""
    heard = b""
    try:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(4096):
            heard += more
    except OSError:  # it was cut off, which is an answer too
        pass
    return heard


def check_that_roles_are_served(opened: Meeting) -> None:
    with opened.store() as store:
        assert store.get("secret") == b"kept"
    assert opened.lost == []


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_an_unauthenticated_peer_gets_zeros_at_most(payload: bytes, opened: Meeting) -> None:
    with opened.stranger() as connection:
        assert heard_after(connection, payload) in (b"", bytes(PROOF_BYTES))
    check_that_roles_are_served(opened)


def test_another_secret_is_reported_to_the_role(opened: Meeting) -> None:
    with pytest.raises(
        ConfigError, match=r"^cluster.secret_file: the master at \S+ has another .* HYBRID_SECRET"
    ):
        Channel(ADDRESS, opened.port, Secret.fresh(), RHYTHM)


class Line:
    """A connection to the rendezvous that somebody in between listens to, and may change."""

    def __init__(self, opened: Meeting, change: Callable[[bytes], bytes] = bytes) -> None:
        self.said = [b"", b""]  # by the role, by the master
        self._change = change
        self._listener = listen(ADDRESS, 0)
        self._master = socket.create_connection((ADDRESS, opened.port), timeout=SECONDS)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept).start()

    def _accept(self) -> None:
        self._listener.settimeout(SECONDS)
        role, _ = self._listener.accept()
        back = threading.Thread(target=self._carry, args=(self._master, role, 1))
        back.start()
        self._carry(role, self._master, 0)
        back.join(SECONDS)
        for each in (role, self._master, self._listener):
            each.close()

    def _carry(self, source: socket.socket, target: socket.socket, who: int) -> None:
        source.settimeout(SECONDS)
        try:
            while chunk := source.recv(4096):
                self.said[who] += chunk
                target.sendall(chunk if who else self._change(chunk))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def ask_through(line: Line, secret: Secret, *question: bytes) -> list[bytes]:
    with closing(Channel(ADDRESS, line.port, secret, RHYTHM)) as asking:
        asking.send(b"store")
        asking.send(*question)
        return asking.receive()


def test_temporary_errors_of_accept_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]
    accept = asyncio.SelectorEventLoop.sock_accept

    async def refuse_at_first(
        loop: asyncio.SelectorEventLoop, listener: socket.socket
    ) -> tuple[socket.socket, Any]:
        if errors:
            raise OSError(error := errors.pop(), os.strerror(error))
        return await accept(loop, listener)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", refuse_at_first)
    with meeting() as opened, opened.store() as store:
        store.set("secret", "kept")
        check_that_roles_are_served(opened)
    assert errors == []


def test_a_recorded_connection_reveals_and_opens_nothing(opened: Meeting) -> None:
    line = Line(opened)
    assert ask_through(line, opened.secret, b"get", b"1", b"secret") == [b"done", b"kept"]
    for said in line.said:
        assert b"kept" not in said
        assert b"secret" not in said
    with opened.stranger() as connection:
        # More is said to it than the master reads: being cut off may overtake the answer.
        assert heard_after(connection, line.said[0]) in (b"", bytes(PROOF_BYTES))
    check_that_roles_are_served(opened)


def test_recorded_frames_stay_secret_if_the_secret_leaks(
    opened: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[KeyPair] = []

    class Kept(KeyPair):
        def __init__(self) -> None:
            super().__init__()
            pairs.append(self)

    monkeypatch.setattr(secure_channel, "KeyPair", Kept)
    line = Line(opened)
    ask_through(line, opened.secret, b"get", b"1", b"secret")
    by_role, by_master = line.said
    masters = by_master.removeprefix(GREETING)[:KEY_BYTES]
    frame = by_role[KEY_BYTES + PROOF_BYTES + 4 :][: sealed_length(by_role[KEY_BYTES + PROOF_BYTES :][:4])]
    public_keys = masters + by_role[:KEY_BYTES]
    for agreed in (b"", bytes(32), masters, by_role[:KEY_BYTES], KeyPair().agree(masters)):
        with pytest.raises(ChannelError):
            FrameCipher(opened.secret, public_keys, agreed, "master").open(frame)
    own = next(each for each in pairs if each.public == by_role[:KEY_BYTES])
    assert FrameCipher(opened.secret, public_keys, own.agree(masters), "master").open(frame) == [b"store"]


@pytest.mark.parametrize("own", [os.urandom(KEY_BYTES), bytes(KEY_BYTES)], ids=["a key", "zeros"])
def test_a_replaced_public_key_is_rejected(own: bytes, opened: Meeting) -> None:
    changed: list[bytes] = []

    def put_in(chunk: bytes) -> bytes:
        if not changed:
            changed.append(chunk)
            return own + chunk[KEY_BYTES:]
        return chunk

    with pytest.raises(ConfigError, match="has another secret"):
        ask_through(Line(opened, put_in), opened.secret, b"get", b"1", b"secret")
    check_that_roles_are_served(opened)


def test_an_altered_frame_ends_the_connection(opened: Meeting) -> None:
    seen = bytearray()

    def flip(chunk: bytes) -> bytes:
        seen.extend(chunk)
        return chunk if len(seen) <= KEY_BYTES + PROOF_BYTES else chunk[:-1] + bytes([chunk[-1] ^ 1])

    with pytest.raises(OSError, match=r"closed|reset"):
        ask_through(Line(opened, flip), opened.secret, b"set", b"secret", b"changed")
    check_that_roles_are_served(opened)


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (b"SSH-2.0-OpenSSH" + bytes(99), ClusterError, r"is no master; check address and port$"),
        (b"hybrid-2" + bytes(99), ClusterError, r"as another version of this project does; install the same"),
        (GREETING + bytes(KEY_BYTES) + os.urandom(PROOF_BYTES), ConfigError, "has another secret"),
    ],
    ids=["another service", "another version", "no proof"],
)
def test_a_listener_that_is_no_master_is_rejected(said: bytes, error: type[Exception], words: str) -> None:
    with listen(ADDRESS, 0) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(SECONDS)
        role = pool.submit(Channel, ADDRESS, listener.getsockname()[1], Secret.fresh(), RHYTHM)
        with listener.accept()[0] as connection:
            connection.sendall(said)
            with pytest.raises(error, match=words):
                role.result(SECONDS)


@pytest.fixture
def small(opened: Meeting, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    """Its room for strangers is."""
    monkeypatch.setattr(rendezvous_server, "MAX_UNAUTHENTICATED", MOST_STRANGERS)
    return opened


def test_roles_are_served_among_many_unauthenticated_peers(small: Meeting) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(small.stranger()) for _ in range(3 * MOST_STRANGERS)]
        check_that_roles_are_served(small)
        gone = 0
        for connection in crowd:
            connection.setblocking(False)
            try:
                gone += connection.recv(1) == b""
            except BlockingIOError:
                pass
            except ConnectionResetError:
                gone += 1
        assert gone >= 2 * MOST_STRANGERS, "the oldest had to go"


def test_a_crowd_does_not_displace_peers_of_other_addresses(small: Meeting) -> None:
    with ExitStack() as stack:
        alone = stack.enter_context(small.stranger())
        for _ in range(2 * MOST_STRANGERS):
            stack.enter_context(small.stranger(source="127.0.0.2"))
        alone.setblocking(False)
        with pytest.raises(BlockingIOError):
            alone.recv(1)


def test_many_connections_wait_for_a_busy_master(opened: Meeting) -> None:
    """As the roles of a large cluster do, which come at once."""
    with ExitStack() as stack, opened.frozen():
        for _ in range(500):
            stack.enter_context(socket.create_connection((ADDRESS, opened.port), timeout=SECONDS))


def test_a_silent_peer_is_disconnected(monkeypatch: pytest.MonkeyPatch, opened: Meeting) -> None:
    monkeypatch.setattr(rendezvous_server, "HANDSHAKE_SECONDS", 0.05)
    with opened.stranger() as connection:
        assert connection.recv(1) == b""


def test_unauthenticated_peers_take_no_memory(opened: Meeting) -> None:
    def visit(times: int) -> None:
        for _ in range(times):
            with opened.stranger() as connection:
                heard_after(connection, os.urandom(1 << 16))

    visit(20)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        visit(100)
        assert tracemalloc.get_traced_memory()[0] - before < 200_000
    finally:
        tracemalloc.stop()


def test_rejected_peers_are_logged_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    with meeting() as opened:
        for _ in range(5):
            with opened.stranger() as connection:
                heard_after(connection, bytes(KEY_BYTES + PROOF_BYTES))
    (record,) = caplog.records
    assert record.getMessage() == ("1 connections refused, the last from 127.0.0.1: wrong secret")
