"""Temporary replacement of standard input and output."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def redirected(descriptor: int, to: int) -> Iterator[None]:
    """Let ``descriptor`` refer to the file of ``to`` for the length of a ``with`` block."""
    before = os.dup(descriptor)
    os.dup2(to, descriptor)
    try:
        yield
    finally:
        os.dup2(before, descriptor)
        os.close(before)
