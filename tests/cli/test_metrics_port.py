"""Metrics of a run while it trains, from ``hybrid launch`` and from a master that was started by hand."""

import urllib.request
from pathlib import Path

import pytest
from support.commands import (
    COMMAND_SECONDS,
    JOB,
    ONE_EACH,
    TRAINER,
    WORKER,
    Command,
    by_hand,
    eventually,
    free_port,
    settings,
    started,
)

STEP = 'hybrid_metric{kind="train",name="step"}'


def served_after_a_step(command: Command, port: int) -> str:
    """Return what the port serves once a step is logged."""
    command.await_step(1)

    def text() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
            return str(response.read().decode())

    assert eventually(lambda: STEP in text(), COMMAND_SECONDS)
    return text()


@pytest.mark.parametrize("is_launch", [True, False], ids=["launch", "by hand"])
def test_the_port_has_the_state_of_a_run(is_launch: bool, tmp_path: Path) -> None:
    port = free_port()
    endless = [*JOB, *ONE_EACH, *settings(train={"epochs": 1000}, cluster={"metrics_port": port})]
    if is_launch:
        with started(["launch", *endless], tmp_path) as command:
            text = served_after_a_step(command, port)
        for role in ("master", "trainer 0", "worker 0"):
            assert f'hybrid_role_memory_bytes{{role="{role}"}}' in text
    else:
        with by_hand([["master"], TRAINER, WORKER], endless, tmp_path) as commands:
            assert "process_resident_memory_bytes" in served_after_a_step(commands[0], port)
