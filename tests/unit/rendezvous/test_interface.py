"""Which interface a role takes, and which one others could not reach."""

import os
import socket

import psutil
import pytest

from hybrid.errors import ConfigError
from hybrid.topology import Role, RoleKind
from workers.rendezvous.network_interface import check_reachable, choose_interface
from workers.rendezvous.registration import Welcome

WORKER = Role(RoleKind.WORKER)
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


def test_the_one_that_has_the_address_is_taken() -> None:
    for name, address in addresses():
        assert choose_interface("auto", address) == name
        assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == name
    assert choose_interface("auto", "127.3.2.1") == "lo"


def test_the_one_that_is_named_is_taken() -> None:
    assert choose_interface("lo", "192.0.2.1") == "lo"


@pytest.mark.parametrize(
    ("wanted", "address", "rule"),
    [
        ("none0", "127.0.0.1", r" = 'none0': this host has .*\blo\b"),
        ("auto", "192.0.2.1", " = 'auto': must be named, since no interface of this host has .* 192.0.2.1$"),
        ("auto", "0.0.0.0", " = 'auto': must be named where the master listens on all addresses$"),
        ("auto", "::", " = 'auto': must be named where the master listens on all addresses$"),
    ],
)
def test_one_that_there_is_not(wanted: str, address: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"^cluster.interface{rule}"):
        choose_interface(wanted, address)


def test_between_hosts_neither_side_is_reached_by_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"eth0": "up,running", "lo": "up,loopback,running", "dummy0": "up,loopback"}
    stats = {name: psutil._ntuples.snicstats(True, 0, 0, 0, text) for name, text in flags.items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    check_reachable(WORKER, "eth0", Welcome("", "a", "network", "eth1"))
    for own in ("lo", "dummy0"):
        with pytest.raises(ConfigError) as raised:
            check_reachable(WORKER, own, Welcome("", "a", "network", "eth1"))
        assert str(raised.value) == (
            f"cluster.interface = '{own}': worker 0 on host {HERE} would be reached by {own}, which no other "
            "host can reach; leave it on auto, or name the one by which the others reach this host"
        )
    with pytest.raises(ConfigError) as raised:
        check_reachable(WORKER, "eth0", Welcome("", "a", "network", "lo"))
    assert str(raised.value) == (
        "cluster.interface = 'lo': the master on host a would be reached by lo, which no other host can "
        f"reach; leave it on auto there, or name the one by which worker 0 on host {HERE} reaches it"
    )
