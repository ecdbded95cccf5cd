"""The address of the master, and the socket on which it listens. Imports nothing slow."""

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

from hybrid.errors import ConfigError

DEFAULT_PORT = 29300  # of a master that is started by hand
LARGEST_PORT = 65535
_LOCAL_NAMES = re.compile(r"(.+\.)?localhost(\.localdomain)?\.?|ip6-(localhost|loopback)", re.IGNORECASE)
_BACKLOG = 1024
_KEY = "cluster.master"


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Host name or IP address, and port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "MasterAddress":
        """Parse ``HOST``, ``HOST:PORT`` or ``[IPv6]:PORT``.

        Raises:
            ConfigError: it is none of these.
        """
        found = re.fullmatch(r"\[([^\[\]]+)\](?::(\d+))?|([^:\[\]\s]+)(?::(\d+))?", text)
        if found is not None:
            host, port = found[1] or found[3], int(found[2] or found[4] or DEFAULT_PORT)
        else:
            host, port = (text, DEFAULT_PORT) if _ip_address(text) is not None else ("", 0)
        if not host or not 0 < port <= LARGEST_PORT:
            raise ConfigError("--master", "must be HOST or HOST:PORT, an IPv6 address in [ ]", text)
        return cls(host, port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a name or an IP address always refers to the local host."""
    number = _ip_address(host)
    return bool(_LOCAL_NAMES.fullmatch(host)) if number is None else number.is_loopback


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on one address only; port 0 takes a free one.

    Raises:
        ConfigError: this host does not have the address, other hosts cannot reach it, or the port is in use.
    """
    try:
        resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(_KEY, f"cannot listen on it: {error.strerror}", address) from error
    family, _, _, _, where = min(resolved, key=lambda each: each[0] != socket.AF_INET)  # IPv4 first
    number = str(where[0])
    if is_loopback(number) and not is_loopback(address):
        rule = f"is {number} on this host, which no other host can reach; give an address, or edit /etc/hosts"
        raise ConfigError(_KEY, rule, address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((number, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(_KEY, f"{error.strerror}; choose another", port) from error
        raise ConfigError(_KEY, f"cannot listen on it: {error.strerror}", address) from error
    return listener
