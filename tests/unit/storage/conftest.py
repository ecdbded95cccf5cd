"""What these tests do, they do on a disk and in each kind of store."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores import BUCKET

from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path


@pytest.fixture(params=["google", "azure"])
def other_store(request: pytest.FixtureRequest) -> RemotePath:
    """The bucket of a store that is not S3's."""
    root = request.getfixturevalue(request.param)
    assert isinstance(root, RemotePath)
    return root


@pytest.fixture(params=["path", "store", "google", "azure"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    """An empty folder, here or in a store."""
    if request.param == "path":
        return tmp_path
    root = request.getfixturevalue(request.param)
    bucket = root if isinstance(root, RemotePath) else parse_path(f"s3://{BUCKET}")
    return bucket / tmp_path.name


@pytest.fixture
def unused() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{mine.getsockname()[1]}"
