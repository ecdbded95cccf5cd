"""Bytes that come while they are written: when they are given, and where they end."""

import os
from collections.abc import Iterator
from itertools import islice

import pytest

from hybrid.data.parse.text_lines import read_descriptor


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe; its reading end, and its writing one, which a test may close."""
    reading, writing = os.pipe()
    writer = os.fdopen(writing, "wb", buffering=0)
    yield reading, writing
    writer.close()
    os.close(reading)


def test_what_is_there_is_given_at_once(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    given = read_descriptor(reading, 1 << 20, at_once=True)
    for text in (b"a\nb", b"\n", b"c\n"):
        os.write(writing, text)
        assert next(given) == text


@pytest.mark.parametrize("at_once", [True, False])
def test_a_terminal_is_not_asked_again_after_its_end(at_once: bool) -> None:
    keys, terminal = os.openpty()
    os.write(keys, b"a\n\x04b\n\x04")
    found = list(islice(read_descriptor(terminal, 100, at_once=at_once), 2))
    os.close(terminal)
    os.close(keys)
    assert b"".join(found) == b"a\n"
