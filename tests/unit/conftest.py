"""Fixtures of tests without RPC."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test enters here is left at its end."""
    with ExitStack() as each:
        yield each
