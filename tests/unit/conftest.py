"""Fixtures of tests without RPC."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from support.stores import BUCKET, Store

from hybrid.storage.remote_path import RemotePath, StoragePath

settings.register_profile("few", max_examples=40)
settings.load_profile("few")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test enters here is left at its end."""
    with ExitStack() as each:
        yield each


@pytest.fixture
def there(store: Store, tmp_path: Path) -> RemotePath:
    """An empty folder of a store."""
    return RemotePath(f"s3://{BUCKET}", tmp_path.name)


@pytest.fixture(params=["path", "url"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    """An empty folder, here or in a store."""
    if request.param == "path":
        return tmp_path
    there: RemotePath = request.getfixturevalue("there")
    return there
