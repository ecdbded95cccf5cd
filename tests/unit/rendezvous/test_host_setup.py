"""A role's address, its network interface, and the limit of open files."""

import os
import resource
import socket

import psutil
import pytest

from hybrid.config import ClusterSection
from hybrid.errors import ConfigError, HybridError
from workers.rendezvous.host_setup import (
    DEFAULT_PORT,
    MasterAddress,
    allow_open_files,
    choose_interface,
    is_loopback,
    listen,
)

CLUSTER = ClusterSection(trainers=2, workers=2)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0", "node0", DEFAULT_PORT),
        ("node0.example.org:29400", "node0.example.org", 29400),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:29400", "::1", 29400),
        ("[::1]", "::1", DEFAULT_PORT),
        ("::1", "::1", DEFAULT_PORT),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ],
)
def test_valid_addresses_are_parsed(text: str, host: str, port: int) -> None:
    address = MasterAddress.parse(text)
    assert address == MasterAddress(host, port)
    assert MasterAddress.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", ":29400", "node0:", "node0:0", "node0:65536", "a b", "a:1:2"])
def test_invalid_addresses_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--master = '.*': "):
        MasterAddress.parse(text)


def test_loopback_names_are_recognized() -> None:
    names = ["127.0.0.1", "127.3.2.1", "::1", "localhost", "localhost.localdomain", "db.localhost"]
    others = ["10.0.0.1", "::", "node0", "node0.localdomain", "notlocalhost"]
    assert [name for name in [*names, "ip6-localhost", *others] if not is_loopback(name)] == others


def test_listener_uses_a_free_port_of_one_address() -> None:
    with listen("127.0.0.1", 0) as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        with socket.create_connection((address, port), timeout=5):
            listener.accept()[0].close()
        with listen("127.0.0.2", port):  # the same port of another address is free
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        with pytest.raises(ConfigError, match=rf"^cluster\.master = {port}: "):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "not an address"])
def test_address_of_another_host_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster\.master = '{address}': "):
        listen(address, 0)


def test_name_that_resolves_to_loopback_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ConfigError, match=r"^cluster\.master = 'node0': .*127\.0\.1\.1"):
        listen("node0", 0)
    listen("localhost", 0).close()


def test_the_interface_with_the_address_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    families = (socket.AF_INET, socket.AF_INET6)
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in families:
                assert choose_interface("auto", each.address) == name
                assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == name
    assert choose_interface("auto", "127.3.2.1") == "lo"


@pytest.mark.parametrize(
    ("configured", "address", "rule"),
    [
        ("none0", "127.0.0.1", r" = 'none0': .*\blo\b"),
        ("auto", "192.0.2.1", " = 'auto': .* 192.0.2.1$"),
        ("auto", "0.0.0.0", " = 'auto': .* all addresses$"),
    ],
)
def test_a_missing_interface_is_rejected(configured: str, address: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"^cluster.interface{rule}"):
        choose_interface(configured, address)


def test_the_limit_of_open_files_is_raised_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 4096)]
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: limits.append(values))
    allow_open_files(CLUSTER)
    assert limits == [(256, 4096), (4096, 4096)]
    allow_open_files(CLUSTER)
    assert len(limits) == 2
    limits.append((64, 100))
    with pytest.raises(HybridError, match=r"156 .* 100 "):
        allow_open_files(CLUSTER)
