"""Fixtures of tests without RPC."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.stores import BUCKET

from hybrid.storage.remote_path import StoragePath, parse_path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test enters here is left at its end."""
    with ExitStack() as each:
        yield each


@pytest.fixture(params=["path", "url"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    """An empty folder, here or in a store."""
    if request.param == "path":
        return tmp_path
    request.getfixturevalue("store")
    return parse_path(f"s3://{BUCKET}/{tmp_path.name}")
