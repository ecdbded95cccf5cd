"""Trained runs for the tests of inference."""

from pathlib import Path

import pytest
from support.trained import clicks_config, shop_config, write_trained


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a DLRM on clicks; read-only."""
    folder = tmp_path_factory.mktemp("trained")
    return write_trained(folder / "run", clicks_config(folder, **{"columns.tags": {"max_ids": 3}}))


@pytest.fixture(scope="session")
def shop_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with four tasks and columns of every kind; read-only."""
    folder = tmp_path_factory.mktemp("shop")
    return write_trained(folder / "run", shop_config(folder))
