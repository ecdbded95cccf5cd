"""What one end of a direction seals, the other opens: once, in order, and unaltered."""

import os

import pytest

from hybrid.security.rejected_messages import RejectedMessage
from hybrid.security.sealed_stream import TAG_BYTES, Direction

KEY = os.urandom(32)


@pytest.mark.parametrize("plain", [b"", b"\0", b"a word", os.urandom(100_000)], ids=len)
def test_what_is_sealed_comes_open(plain: bytes) -> None:
    here, there = Direction(KEY), Direction(KEY)
    sealed = [here.seal(plain) for _ in range(3)]
    assert len(set(sealed)) == 3, "a nonce came twice"
    assert {len(each) for each in sealed} == {len(plain) + TAG_BYTES}
    assert [there.open(each) for each in sealed] == [plain] * 3


def test_memory_can_be_given_for_both() -> None:
    plain, sealed, opened = os.urandom(1000), bytearray(1000 + TAG_BYTES), bytearray(1000)
    Direction(KEY).seal_into(plain, memoryview(sealed))
    assert sealed == Direction(KEY).seal(plain)
    Direction(KEY).open_into(memoryview(sealed), memoryview(opened))
    assert opened == plain


def test_what_was_altered_repeated_left_out_or_is_of_another_is_refused() -> None:
    here = Direction(KEY)
    first, second = here.seal(b"one"), here.seal(b"two")
    altered = bytes([first[0] ^ 1]) + first[1:]
    there = Direction(KEY)
    assert there.open(first) == b"one"
    for receiver, sealed in [
        (Direction(KEY), altered),
        (Direction(KEY), first[:-1]),
        (Direction(KEY), b""),
        (Direction(KEY), second),
        (there, first),
        (Direction(os.urandom(32)), first),
    ]:
        with pytest.raises(RejectedMessage, match="altered, repeated or left out"):
            receiver.open(sealed)
    with pytest.raises(RejectedMessage, match="altered, repeated or left out"):
        Direction(KEY).open_into(memoryview(altered), memoryview(bytearray(3)))
