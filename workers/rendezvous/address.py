"""Where a master is, as roles are told it. Imports nothing slow."""

import ipaddress
import re
from dataclasses import dataclass

from hybrid.errors import ConfigError

DEFAULT_PORT = 29300  # of a master that is started by hand
LARGEST_PORT = 65535
_LOCAL_NAMES = re.compile(r"(.+\.)?localhost(\.localdomain)?\.?|ip6-(localhost|loopback)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """Of a master: name or number of its host, and port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """What ``HOST``, ``HOST:PORT`` or ``[IPv6]:PORT`` means.

        Raises:
            ConfigError: it is none of these.
        """
        found = re.fullmatch(r"\[([^\[\]]+)\](?::(\d+))?|([^:\[\]\s]+)(?::(\d+))?", text)
        if found is not None:
            host, port = found[1] or found[3], int(found[2] or found[4] or DEFAULT_PORT)
        else:
            host, port = (text, DEFAULT_PORT) if _number(text) is not None else ("", 0)
        if not host or not 0 < port <= LARGEST_PORT:
            raise ConfigError("--master", "must be HOST or HOST:PORT, an IPv6 address in [ ]", text)
        return cls(host, port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a name or number of a host means, by itself, the one that asks."""
    number = _number(host)
    return bool(_LOCAL_NAMES.fullmatch(host)) if number is None else number.is_loopback
