"""Runs on two and three hosts have the bits of a run on one host."""

from pathlib import Path

import pytest
from chaos_run.run_comparison import differences
from support.commands import output_of, settings
from support.host_roles import placed, started_on
from support.hosts import Host
from support.namespaces import needs_hosts

pytestmark = [needs_hosts, pytest.mark.root]


def trained_on(
    hosts: list[Host], arguments: list[str], run: Path, trainers: int = 1, workers: int = 1
) -> None:
    """Train a run to its end; no role may report an error or leave a process behind."""
    job = [*arguments, *settings(run={"folder": run})]
    with started_on(placed(hosts, trainers, workers), job) as roles:
        endings = {name: command.wait() for name, command in roles.items()}
    assert {name: (ended.code, ended.stderr) for name, ended in endings.items()} == dict.fromkeys(
        roles, (0, "")
    )
    assert [host.processes() for host in hosts] == [[] for _ in hosts]


@pytest.mark.parametrize(
    ("update", "num_hosts", "counts"),
    [
        ("lookahead", 3, (2, 1)),
        pytest.param("sync", 2, (1, 1), marks=pytest.mark.long),
        pytest.param("sync", 3, (2, 2), marks=pytest.mark.long),
        pytest.param("lookahead", 3, (2, 2), marks=pytest.mark.long),
    ],
)
def test_several_hosts_have_the_bits_of_one_host(
    update: str, num_hosts: int, counts: tuple[int, int], hosts: list[Host], tiny: list[str], shared: Path
) -> None:
    folder = shared / f"{update}-{num_hosts}"
    folder.mkdir()
    job = [*tiny, *settings(train={"update": update})]
    trained_on(hosts[:num_hosts], job, folder / "hosts", *counts)
    alone = settings(run={"folder": folder / "one"}, cluster={"trainers": counts[0], "workers": counts[1]})
    output_of(["launch", *job, *alone], folder)
    assert differences(folder / "one", folder / "hosts") == []
