"""Connections with the secret: what is read on them is what the other side has written, and nothing else."""

from __future__ import annotations

import os

import pytest

from hybrid.trust.secret import Secret
from workers.joining.channel import LARGEST_FRAME, ChannelError, KeyPair, Seal, sealed_length

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
