"""Standard input and output of this process, for a while another's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def redirected(descriptor: int, to: int) -> Iterator[None]:
    """In here, ``descriptor`` leads where ``to`` leads."""
    before = os.dup(descriptor)
    os.dup2(to, descriptor)
    try:
        yield
    finally:
        os.dup2(before, descriptor)
        os.close(before)
