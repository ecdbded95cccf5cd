"""One short run, trained by the real command, for all tests that only read it or go on from a copy."""

import pytest
from support.commands import JOB, TrainedRun, output_of, settings


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a job that trains within a second once its cluster is up; 16 steps an epoch."""
    return [*JOB, *settings(data={"cache_folder": tmp_path_factory.mktemp("prepared")})]


@pytest.fixture(scope="session")
def endless(tiny: list[str]) -> list[str]:
    """The same, going on until it is stopped; for tests that interfere."""
    return [*tiny, *settings(train={"epochs": 1_000_000})]


@pytest.fixture(scope="session")
def trained(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run of one epoch on two trainers and two workers; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    arguments = [*tiny, *settings(run={"folder": folder / "a run"}, checkpoint={"every_steps": 5})]
    return TrainedRun(folder / "a run", output_of(["launch", *arguments], folder), tiny)
