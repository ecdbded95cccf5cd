"""Importing much in little time. Free of torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import modules in here that stay for the life of the process.

    Looking for garbage among what they make takes a fifth of the time of importing torch, and finds none;
    nor is it looked for there later, which would also copy the memory that forked processes share.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
