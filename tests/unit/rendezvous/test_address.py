"""A master's address, as a role is given it on the command line."""

import pytest

from hybrid.errors import ConfigError
from workers.rendezvous.address import DEFAULT_PORT, Address, is_loopback


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
def test_what_is_an_address(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert address == Address(host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", ":29400", "node0:", "node0:port", "node0:0", "node0:65536", "a b", "a:1:2"]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--master = '.*': must be HOST or HOST:PORT, an IPv6 address in \["
    ):
        Address.parse(text)


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
def test_what_means_the_host_that_asks(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
