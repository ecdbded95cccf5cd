"""What comes by a descriptor while it is written: a pipe, a terminal, a file."""

import os
import select
from collections.abc import Iterator
from pathlib import Path

from hybrid.errors import DataError

STDIN = Path("standard input")  # as it is called in messages
_READ_BYTES = 1 << 20


def chunks(descriptor: int, size: int, *, at_once: bool) -> Iterator[bytes]:
    """All bytes to the end, at most ``size`` at a time.

    Args:
        at_once: whether to give what is there, rather than to wait until there is more.

    Raises:
        DataError: it cannot be read.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    is_open = True
    while is_open:
        parts, room = [], size
        while room:
            part = _read(descriptor, min(room, _READ_BYTES))
            if not part:  # a terminal would give more when asked again
                is_open = False
                break
            parts.append(part)
            room -= len(part)
            if at_once and not poll.poll(0):
                break
        if parts:
            yield b"".join(parts)


def _read(descriptor: int, size: int) -> bytes:
    try:
        return os.read(descriptor, size)
    except OSError as error:
        raise DataError(f"{STDIN}: cannot be read ({error.strerror})") from error
