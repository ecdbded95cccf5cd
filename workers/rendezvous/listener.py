"""The master's rendezvous socket."""

import errno
import socket

from hybrid.errors import ConfigError
from workers.rendezvous.address import is_loopback

_BACKLOG = 1024
_KEY = "cluster.master_address"


def listen(address: str, port: int) -> socket.socket:
    """A socket listening on one address only; port 0 takes a free one.

    Raises:
        ConfigError: the address is not this machine's, or one that other machines cannot mean, or the port is
            in use.
    """
    family, where = _meant(address, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError("cluster.master_port", f"{error.strerror}; choose another", port) from error
        raise ConfigError(_KEY, f"cannot listen on it: {error.strerror}", address) from error
    return listener


def _meant(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The family and the number of an address, which may be a name."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(_KEY, f"cannot listen on it: {error.strerror}", address) from error
    family, _, _, _, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    number = str(where[0])
    if is_loopback(number) and not is_loopback(address):
        rule = (
            f"is {number} on this machine, which no other can reach; give an address, or mend /etc/hosts, "
            "which says so"
        )
        raise ConfigError(_KEY, rule, address)
    return family, (number, port)
