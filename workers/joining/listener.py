"""The master's rendezvous socket."""

import errno
import socket

from hybrid.errors import ConfigError

_BACKLOG = 1024


def listen(address: str, port: int) -> socket.socket:
    """A socket listening on one address only; port 0 takes a free one.

    Raises:
        ConfigError: the address is not this machine's, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError("cluster.master_port", f"{error.strerror}; choose another", port) from error
        raise ConfigError(
            "cluster.master_address", f"cannot listen on it: {error.strerror}", address
        ) from error
    return listener
