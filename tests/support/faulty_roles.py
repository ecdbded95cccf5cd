"""Importing this has a process, and all that are forked from it, raise what a test asks for by a signal."""

import signal
from types import FrameType

from support.faults import ERRORS, RAISING, WORDS


def _raise(number: int, frame: FrameType | None) -> None:
    error = next(ERRORS[name] for name, asked in RAISING.items() if asked == number)
    raise error(WORDS)


for _number in RAISING.values():
    signal.signal(_number, _raise)
