"""Connections with the secret: what is read on them is what the other side has written, and nothing else."""

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from workers.rendezvous.channel import LARGEST_FRAME, Channel, ChannelError, KeyPair, Seal, sealed_length
from workers.rendezvous.heartbeat_interval import Rhythm

PUBLIC_KEYS, AGREED = os.urandom(64), os.urandom(32)
HEADER = 4


def pair(
    secret: Secret | None = None, public_keys: bytes = PUBLIC_KEYS, agreed: bytes = AGREED
) -> tuple[Seal, Seal]:
    secret = secret or Secret.fresh()
    return Seal(secret, public_keys, agreed, "role"), Seal(secret, public_keys, agreed, "master")


@pytest.mark.parametrize("parts", [[b"set", b"key", b"\0\xff" * 9], [b""], [], [bytes(100_000)]], ids=len)
def test_a_message_comes_as_it_was_sent_in_both_directions(parts: list[bytes]) -> None:
    role, master = pair()
    for sender, receiver in ((role, master), (master, role)):
        for _ in range(3):
            frame = sender.seal(parts)
            assert sealed_length(frame[:HEADER]) == len(frame) - HEADER
            assert receiver.open(frame[HEADER:]) == parts


def test_a_message_cannot_be_read_on_the_way() -> None:
    role, _ = pair()
    assert b"a word" not in role.seal([b"a word"])


def test_what_was_altered_repeated_or_left_out_is_refused() -> None:
    role, master = pair()
    first, second = (role.seal([b"add", b"n"])[HEADER:] for _ in range(2))
    assert first != second
    for at in (0, len(first) - 1):
        _, fresh = pair()
        altered = bytearray(first)
        altered[at] ^= 1
        with pytest.raises(ChannelError, match="altered, repeated or left out"):
            fresh.open(bytes(altered))
    assert master.open(first)
    with pytest.raises(ChannelError):
        master.open(first)
    role, master = pair()
    role.seal([b"left out"])
    with pytest.raises(ChannelError):
        master.open(role.seal([b"next"])[HEADER:])


def test_a_message_is_good_on_its_own_connection_and_in_its_own_direction_only() -> None:
    secret = Secret.fresh()
    role, master = pair(secret)
    frame = role.seal([b"set"])[HEADER:]
    others = [pair(secret)[0], *pair(secret, os.urandom(64)), *pair(secret, agreed=os.urandom(32)), pair()[1]]
    for other in others:
        with pytest.raises(ChannelError):
            other.open(frame)
    assert master.open(frame) == [b"set"]


def test_no_length_is_believed_beyond_the_largest_frame() -> None:
    role, _ = pair()
    with pytest.raises(ValueError, match=f"at most {LARGEST_FRAME}"):
        role.seal([bytes(LARGEST_FRAME)])
    assert sealed_length((LARGEST_FRAME + 16).to_bytes(HEADER, "big")) == LARGEST_FRAME + 16
    for length in (LARGEST_FRAME + 17, 2**32 - 1):
        with pytest.raises(ChannelError, match=f"a frame of {length} bytes"):
            sealed_length(length.to_bytes(HEADER, "big"))


def test_both_sides_agree_and_no_other_two_do() -> None:
    master, role, other = KeyPair(), KeyPair(), KeyPair()
    assert master.agree(role.public) == role.agree(master.public)
    assert len({master.agree(role.public), master.agree(other.public), other.agree(role.public)}) == 3


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31), b""], ids=["zeros", "one", "nothing"])
def test_what_is_no_public_key_is_not_agreed_with(public: bytes) -> None:
    """With points of small order everybody comes to zeros, which everybody knows."""
    with pytest.raises(ChannelError, match="no public key"):
        KeyPair().agree(public)


class Wire:
    """A role's socket with a clock of its own, which goes on while somebody waits.

    Attributes:
        masters_address: as it is seen here; that of the role is 10.0.0.1.
        now: on the clock.
        said: each time that somebody waits, how long he was stopped before, and what is there then.
        waited: how long somebody has waited.
        role, master: how frames are sealed by each side.
    """

    def __init__(self) -> None:
        self.masters_address = "10.0.0.1"
        self.now = self.waited = 0.0
        self.said: Iterator[tuple[float, bytes]] = iter(())
        self.role, self.master = pair()

    def setsockopt(self, *_: int) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    def getpeername(self) -> tuple[str, int]:
        return self.masters_address, 2

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0, "this would not even look"
        self._timeout = seconds

    def recv(self, count: int) -> bytes:
        stopped, message = next(self.said, (0.0, b""))
        self.now += stopped
        if not message:
            self._wait()
        return message

    def sendall(self, frame: bytes) -> None:
        self._wait()

    def close(self) -> None: ...

    def _wait(self) -> None:
        self.now += self._timeout
        self.waited += self._timeout
        raise TimeoutError


RHYTHM = Rhythm(7.0)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """What the next connection goes over, whose other side is trusted."""
    wire = Wire()
    monkeypatch.setattr("workers.rendezvous.channel.socket.create_connection", lambda *_, **__: wire)
    monkeypatch.setattr("workers.rendezvous.channel.time", SimpleNamespace(monotonic=lambda: wire.now))
    monkeypatch.setattr(Channel, "_shake_hands", lambda *_: wire.role)
    return wire


def connected() -> Channel:
    return Channel("", 0, Secret.fresh(), RHYTHM)


@pytest.mark.parametrize("due_seconds", [0.0, 3.0, -1.0])
def test_a_master_is_waited_for_as_long_as_the_rhythm_says(wire: Wire, due_seconds: float) -> None:
    with pytest.raises(ClusterError, match=r"^the master is frozen: no sign of life for 7 s"):
        connected().receive(due_seconds)
    assert wire.waited == pytest.approx(7.0 + due_seconds, abs=1e-2)


def test_one_who_takes_no_message_is_waited_for_as_long(wire: Wire) -> None:
    with pytest.raises(ClusterError, match=r"^the master is frozen: no sign of life for 7 s"):
        connected().send(b"alive")
    assert wire.waited == 7.0


def test_a_role_that_was_stopped_itself_waits_anew(wire: Wire) -> None:
    """Master and role were stopped, as by a pause of their host, and the master goes on a little later."""
    frame = wire.master.seal([b"go on"])
    wire.said = iter([(3600.0, b""), (0.0, b""), (3600.0, frame[:2]), (3600.0, frame[2:])])
    assert connected().receive() == [b"go on"]


def test_a_master_elsewhere_that_says_nothing_may_be_frozen_gone_or_cut_off(wire: Wire) -> None:
    wire.masters_address = "10.0.0.2"
    with pytest.raises(ClusterError, match=r"^the master at a:7 is unreachable: no sign of life for 7 s"):
        Channel("a", 7, Secret.fresh(), RHYTHM).receive()
