"""The interface of a role, and the limit of open files."""

import os
import resource
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.commands import ROOT

from hybrid.config import ClusterSection
from hybrid.errors import ConfigError, HybridError
from hybrid.topology import Role, RoleKind
from workers.rendezvous.heartbeat import Acceptance
from workers.rendezvous.host_requirements import (
    allow_open_files,
    check_reachable,
    choose_interface,
    files_needed,
)

WORKER = Role(RoleKind.WORKER)
CLUSTER = ClusterSection(trainers=2, workers=2)
HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as before, after each test."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")


def addresses() -> list[tuple[str, str]]:
    """Of this machine, with their interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = psutil.net_if_addrs().items()
    return [(name, each.address) for name, of_it in found for each in of_it if each.family in families]


def test_the_interface_with_the_address_is_chosen() -> None:
    for name, address in addresses():
        assert choose_interface("auto", address) == name
        assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == name
    assert choose_interface("auto", "127.3.2.1") == "lo"


@pytest.mark.parametrize(
    ("wanted", "address", "rule"),
    [
        ("none0", "127.0.0.1", r" = 'none0': this host has .*\blo\b"),
        ("auto", "192.0.2.1", " = 'auto': must be named, since no interface of this host has .* 192.0.2.1$"),
        ("auto", "0.0.0.0", " = 'auto': must be named where the master listens on all addresses$"),
        ("auto", "::", " = 'auto': must be named where the master listens on all addresses$"),
    ],
)
def test_a_missing_interface_is_rejected(wanted: str, address: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"^cluster.interface{rule}"):
        choose_interface(wanted, address)


def test_loopback_is_rejected_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"eth0": "up,running", "lo": "up,loopback,running", "dummy0": "up,loopback"}
    stats = {name: psutil._ntuples.snicstats(True, 0, 0, 0, text) for name, text in flags.items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    check_reachable(WORKER, "eth0", Acceptance("", "a", "network", "eth1"))
    for own in ("lo", "dummy0"):
        with pytest.raises(ConfigError) as raised:
            check_reachable(WORKER, own, Acceptance("", "a", "network", "eth1"))
        assert str(raised.value) == (
            f"cluster.interface = '{own}': worker 0 on host {HERE} would be reached by {own}, which no other "
            "host can reach; leave it on auto, or name the one by which the others reach this host"
        )
    with pytest.raises(ConfigError) as raised:
        check_reachable(WORKER, "eth0", Acceptance("", "a", "network", "lo"))
    assert str(raised.value) == (
        "cluster.interface = 'lo': the master on host a would be reached by lo, which no other host can "
        f"reach; leave it on auto there, or name the one by which worker 0 on host {HERE} reaches it"
    )


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits that this process has, the newest last, as far as the code can tell."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: found.append(values))
    return found


def test_the_soft_limit_is_raised_to_the_hard_limit(limits: list[tuple[int, int]]) -> None:
    allow_open_files(CLUSTER)
    assert limits == [(256, 4096), (4096, 4096)]
    allow_open_files(CLUSTER)
    assert len(limits) == 2


def test_a_low_hard_limit_is_rejected(limits: list[tuple[int, int]]) -> None:
    limits.append((64, 100))
    with pytest.raises(HybridError) as caught:
        allow_open_files(CLUSTER)
    assert str(caught.value) == (
        "a role of 1 master, 2 trainer(s), 2 worker(s) needs about 156 open files, and 100 are allowed "
        "(ulimit -Hn); raise that, or start fewer roles"
    )


def test_needed_files_grow_with_roles_and_transports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    roles = ((2, 2), (2, 3), (32, 31))
    needed = [files_needed(ClusterSection(trainers=t, workers=w)) for t, w in roles]
    assert needed == [156, 165, 687]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert files_needed(CLUSTER) == 312


@pytest.mark.parametrize("command", ["launch", "run own:main", "master"])
def test_commands_report_a_low_limit_before_they_start_roles(command: str, tmp_path: Path) -> None:
    line = f"ulimit -n 60; exec {sys.executable} -m workers {command}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYBRID_SECRET": secrets.token_hex(32)}
    ran = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.endswith("60 are allowed (ulimit -Hn); raise that, or start fewer roles\n")
    assert not list(tmp_path.iterdir())
