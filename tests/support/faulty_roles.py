"""Makes this process, and those forked from it, raise the exception that a test requests by a signal."""

import signal
from types import FrameType

from support.faults import ERRORS, RAISING, WORDS


def _raise(number: int, frame: FrameType | None) -> None:
    error = next(ERRORS[name] for name, requested in RAISING.items() if requested == number)
    raise error(WORDS)


for _number in RAISING.values():
    signal.signal(_number, _raise)
