"""A master's address, as a role is given it on the command line."""

import socket

import pytest

from hybrid.errors import ConfigError
from workers.rendezvous.master_address import DEFAULT_PORT, MasterAddress, is_loopback, listen


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0", "node0", DEFAULT_PORT),
        ("node0.example.org:29400", "node0.example.org", 29400),
        ("10.0.0.1", "10.0.0.1", DEFAULT_PORT),
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


@pytest.mark.parametrize(
    "text", ["", ":29400", "node0:", "node0:port", "node0:0", "node0:65536", "a b", "a:1:2"]
)
def test_invalid_addresses_are_rejected(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--master = '.*': must be HOST or HOST:PORT, an IPv6 address in \["
    ):
        MasterAddress.parse(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("localhost.localdomain", True),
        ("db.localhost", True),
        ("ip6-localhost", True),
        ("10.0.0.1", False),
        ("::", False),
        ("node0", False),
        ("node0.localdomain", False),
        ("notlocalhost", False),
    ],
)
def test_loopback_names_are_recognized(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


class TestListener:
    def test_a_free_port_on_the_given_address_only(self) -> None:
        with listen("127.0.0.1", 0) as listener:
            address, port = listener.getsockname()
            assert address == "127.0.0.1"
            with socket.create_connection((address, port), timeout=5):
                listener.accept()[0].close()
            # The same port of another address is not taken, neither there nor by a wildcard here.
            with listen("127.0.0.2", port):
                pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=5)

    def test_a_port_in_use_names_the_port(self) -> None:
        with listen("127.0.0.1", 0) as first:
            port = first.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"^cluster\.master = {port}: Address already in use"):
                listen("127.0.0.1", port)

    @pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "not an address"])
    def test_an_address_of_another_host_is_named(self, address: str) -> None:
        with pytest.raises(ConfigError, match=rf"^cluster\.master = '{address}': cannot listen on it: \w"):
            listen(address, 0)


def test_a_name_that_resolves_to_loopback_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    with pytest.raises(ConfigError) as raised:
        listen("node0", 0)
    assert str(raised.value) == (
        "cluster.master = 'node0': is 127.0.1.1 on this host, which no other host can reach; give "
        "an address, or edit /etc/hosts"
    )
    listen("localhost", 0).close()
