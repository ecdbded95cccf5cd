"""Hosts that differ or cannot reach each other: every role reports one line."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.commands import ROOT, Ended, settings
from support.host_roles import MASTER, placed, started_on
from support.hosts import HOME, INTERFACE, Host
from support.namespaces import needs_hosts

from workers.exit_codes import ExitCode

pytestmark = [needs_hosts, pytest.mark.long]

SECONDS = 40.0
ROLES = (MASTER, "trainer 0", "worker 0")


@pytest.fixture
def job(tiny: list[str], shared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A job in its own run folder, with short timeouts."""
    run = shared / tmp_path_factory.mktemp("run").name
    cluster = {"start_timeout_seconds": 8, "timeout_seconds": 4}
    return [*tiny, *settings(run={"folder": run}, cluster=cluster)]


def endings(hosts: Mapping[str, Host], job: Sequence[object]) -> dict[str, Ended]:
    with started_on(hosts, job) as roles:
        return {name: command.wait(SECONDS) for name, command in roles.items()}


def test_missing_user_module_names_the_host(hosts: list[Host], job: list[str], shared: Path) -> None:
    shutil.copy(ROOT / "tests/support/dropout_net.py", shared / "net.py")
    hosts[0].run("cp", shared / "net.py", HOME / "custom_net.py")
    own = settings(dense={"net": "custom_net:build"})
    for name, each in endings(placed(hosts[:2], trainers=2), [*job, *own]).items():
        assert each.code == ExitCode.FAILED, each
        pattern = rf"hybrid {name}: .*dense\.net = 'custom_net:build': .* on host host-1; .*\n"
        assert re.fullmatch(pattern, each.stderr), each.stderr


@contextmanager
def firewall(one: Host, other: Host) -> Iterator[None]:
    """Drop all packets between two hosts without a response: frames go to an unused address."""
    unused = f"lladdr 02:00:00:00:00:99 dev {INTERFACE} nud permanent"
    one.configure(f"neigh replace {other.address} {unused}")
    other.configure(f"neigh replace {one.address} {unused}")
    try:
        yield
    finally:
        one.configure(f"neigh delete {other.address} dev {INTERFACE}")
        other.configure(f"neigh delete {one.address} dev {INTERFACE}")


def test_two_roles_that_cannot_connect_are_named(hosts: list[Host], job: list[str]) -> None:
    with firewall(*hosts[1:]):
        ended = endings(dict(zip(ROLES, hosts, strict=True)), job)
    for name, each in ended.items():
        reason = r".* on host host-\d \(interface \S+\) cannot reach .*cluster\.interface.*"
        assert re.fullmatch(f"hybrid {name}: {reason}\n", each.stderr), each.stderr
        assert each.code == ExitCode.AGAIN
