"""Hosts that stay alive between cases. See support/hosts.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import JOB, settings
from support.hosts import Host, Switch


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switch]:
    with Switch(tmp_path_factory.mktemp("output")) as switch:
        yield switch


@pytest.fixture(scope="session")
def hosts(switch: Switch, shared: Path) -> list[Host]:
    """Three hosts; a test that damages one restores it."""
    return [switch.host(shared) for _ in range(3)]


@pytest.fixture(scope="session")
def tiny(shared: Path) -> list[str]:
    """Settings of a job of 16 steps, without the folder of its run."""
    cluster = {"start_timeout_seconds": 30}
    return [*JOB, *settings(data={"cache_folder": shared / "prepared"}, cluster=cluster)]


@pytest.fixture
def endless(tiny: list[str], tmp_path_factory: pytest.TempPathFactory, shared: Path) -> list[str]:
    """The same job in its own run folder, without an end."""
    run = shared / tmp_path_factory.mktemp("run").name
    return [*tiny, *settings(train={"epochs": 1_000_000}, run={"folder": run})]
