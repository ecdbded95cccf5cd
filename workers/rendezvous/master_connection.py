"""The way to the master; where there is none, a line says why. Free of torch."""

import errno
import socket
import time
from contextlib import suppress

from hybrid.errors import ClusterError, first_line
from hybrid.security.secret import Secret
from workers.rendezvous.address import Address, is_loopback
from workers.rendezvous.channel import Channel
from workers.rendezvous.heartbeat_interval import Rhythm

_POLL_SECONDS = 0.05
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)


def connect(address: Address, secret: Secret, rhythm: Rhythm, timeout_seconds: float) -> Channel:
    """Connect to the master, which may not be there yet; one that is there and says nothing is frozen.

    Args:
        timeout_seconds: how long to wait for it.

    Raises:
        ClusterError: it has not come, is frozen, or is no master.
        ConfigError: it has another secret.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return Channel(address.host, address.port, secret, rhythm)
        except OSError as error:
            if time.monotonic() > deadline:
                waited = f"no master at {address} after {timeout_seconds:g} s"
                raise ClusterError(f"{waited}: {_why_none(address, error)}") from error
            time.sleep(_POLL_SECONDS)


def _why_none(address: Address, error: OSError) -> str:
    """What is wrong where nobody can be connected to, and what to look at."""
    here = socket.gethostname()
    if isinstance(error, socket.gaierror):
        return f"host {here} knows no {address.host} ({error.strerror}); check the name, or give its address"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"connection refused{_meant(address)}, so nobody listens on that port there; start it, or check "
            "the port and its cluster.master_address"
        )
    if error.errno in _NO_ROUTE:
        return f"there is no way to it from host {here} ({error.strerror}); check the address and the network"
    if isinstance(error, TimeoutError):
        return (
            f"nothing comes back to host {here}; check the address, and whether a firewall keeps out port "
            f"{address.port}"
        )
    return f"{first_line(error)}; start it, or check its log"


def _meant(address: Address) -> str:
    """What a name means here, which may be this host where it should be another: Debian's 127.0.1.1."""
    if is_loopback(address.host):
        return ""
    with suppress(OSError):
        number = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4][0]
        if number != address.host:
            return f" ({address.host} is {number} on host {socket.gethostname()})"
    return ""
