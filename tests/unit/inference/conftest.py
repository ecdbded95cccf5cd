"""Trained runs for the tests of inference."""

from pathlib import Path

import pytest
from support.trained import clicks_config, shop_config, write_trained

from workers.cli.model_commands import export_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a DLRM on clicks; read-only."""
    folder = tmp_path_factory.mktemp("trained")
    return write_trained(folder / "run", clicks_config(folder, **{"columns.tags": {"max_ids": 3}}))


@pytest.fixture(scope="session")
def shop_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with four tasks, columns of every kind, a history and a remote net; read-only."""
    folder = tmp_path_factory.mktemp("shop")
    net = "hstu(history = 'seen', candidate = 'item', blocks = 1)"
    return write_trained(folder / "run", shop_config(folder, dense={"net": net, "remote_mlp": [8]}))


@pytest.fixture(scope="session")
def shop_served(shop_run: Path) -> Path:
    """The run with four tasks, exported in all formats; read-only."""
    export_run(shop_run, served := shop_run.with_name("served"), ["program", "onnx", "tables"], None)
    return served
