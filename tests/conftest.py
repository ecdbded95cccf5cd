"""Fixtures of clusters that stay alive between cases.

The process that distributes the tests imports this module, but not torch; fixtures import what they need.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hybrid.module_imports import fast_imports

if TYPE_CHECKING:
    from support.cluster import Clusters
    from support.stores import Store

    from hybrid.storage.remote_path import RemotePath

# Commands set this before they import torch; forked processes have imported torch already.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, which takes a quarter of the time; then rarely collect garbage."""
    with fast_imports():
        collected = yield
    gc.set_threshold(5000, 20, 50)  # with the default, exports of models take a fifth longer
    return collected


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root: it makes hosts, or becomes another user")


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give the tests their own folder of state, with the key that signs runs, and their own credentials."""
    from support.stores import CREDENTIALS

    os.environ.update(CREDENTIALS)
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    from support.cluster import Clusters

    every = Clusters()
    yield every
    every.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of prepared data."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="session")
def store() -> Iterator[Store]:
    """An S3 server; the environment of this process and its children names it."""
    from support.stores import Store, named_by_environment

    server = Store()
    with named_by_environment(server.environment):
        yield server
    server.close()


@pytest.fixture(scope="session")
def google() -> Iterator[RemotePath]:
    """A bucket of an emulator of Google Cloud Storage."""
    from support.stores import google_bucket

    with google_bucket() as bucket:
        yield bucket


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemotePath]:
    """A container of Azurite; the environment of this process and its children has the key."""
    from support.stores import AZURITE, azure_container

    if AZURITE is None:
        pytest.skip("needs azurite-blob, which npm install --global azurite puts on the path")
    with azure_container(tmp_path_factory.mktemp("azurite")) as container:
        yield container
