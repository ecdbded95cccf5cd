"""Fixtures of clusters that stay alive between cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Clusters


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    every = Clusters()
    yield every
    every.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these tests keep prepared data."""
    return tmp_path_factory.mktemp("prepared")
