"""A run of which tests take the model."""

from pathlib import Path

import pytest
from support.trained import clicks_config, shop_config, write_trained


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a DLRM on clicks; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    return write_trained(folder / "run", clicks_config(folder))


@pytest.fixture(scope="session")
def shop_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four tasks and columns of every kind; not to be changed."""
    folder = tmp_path_factory.mktemp("shop")
    return write_trained(folder / "run", shop_config(folder))
