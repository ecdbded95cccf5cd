"""Checks of a role's host: address, network interface, limit of open files. Does not import torch."""

import errno
import ipaddress
import os
import re
import resource
import socket
from dataclasses import dataclass

import psutil

from hybrid.config import ClusterSection
from hybrid.errors import ConfigError, HybridError
from hybrid.topology import polls_shared_memory

DEFAULT_PORT = 29300  # port of a master that was started without the launcher
LARGEST_PORT = 65535
AUTO = "auto"
LOOPBACK = "lo"  # the name on every Linux
_LOCAL_NAMES = re.compile(r"(.+\.)?localhost(\.localdomain)?\.?|ip6-(localhost|loopback)", re.IGNORECASE)
_BACKLOG = 1024
_MASTER_KEY, _INTERFACE_KEY = "cluster.master", "cluster.interface"
# Open files of the master, which has the most: a constant, and a number for each other role. Measured with 5
# to 41 roles (torch 2.13) and rounded up. Each pair of roles has two connections. A connection through shared
# memory takes 18 more files.
_FILES_ALONE = 120
_FILES_PER_ROLE, _FILES_PER_ROLE_BY_SHARED_MEMORY = 9, 48


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """The host name or IP address of the master, and its port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "MasterAddress":
        """Parse ``HOST[:PORT]`` or ``[IPv6][:PORT]``; without a port, use 29300. ConfigError if invalid."""
        host, port = ClusterSection(master=text).master_endpoint
        is_host = re.fullmatch(r"[^:\[\]\s]+", host) or _ip_address(host) is not None
        if not is_host or port > LARGEST_PORT or text.endswith(":0"):
            raise ConfigError("--master", "must be HOST or HOST:PORT, an IPv6 address in [ ]", text)
        return cls(host, port or DEFAULT_PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address, or a name of one on every machine, such as "localhost"."""
    number = _ip_address(host)
    return bool(_LOCAL_NAMES.fullmatch(host)) if number is None else number.is_loopback


def listen(address: str, port: int, port_key: str = _MASTER_KEY) -> socket.socket:
    """Return a socket that listens on one address only; port 0 selects a free port.

    ConfigError if this host cannot listen on ``address``, if the port is in use or forbidden, or if
    ``address`` is a name (not localhost) of a loopback address. Port errors contain the text ``port_key``.
    """
    try:
        resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(_MASTER_KEY, f"cannot listen on it: {error.strerror}", address) from error
    family, _, _, _, where = min(resolved, key=lambda each: each[0] != socket.AF_INET)  # IPv4 first
    number = str(where[0])
    if is_loopback(number) and not is_loopback(address):
        rule = f"is {number} on this host, which no other host can reach; give an address, or edit /etc/hosts"
        raise ConfigError(_MASTER_KEY, rule, address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((number, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(port_key, f"{error.strerror}; choose another", port) from error
        raise ConfigError(_MASTER_KEY, f"cannot listen on it: {error.strerror}", address) from error
    return listener


def choose_interface(configured: str, address: str) -> str:
    """Return this process's network interface, and set the environment variables that gloo and NCCL read.

    Args:
        configured: ``cluster.interface``; "auto" is the interface with ``address``. ConfigError if this host
            does not have the interface.
        address: the local address of the connection to the master; on the master, of the listening socket.
    """
    interface, number = configured, ipaddress.ip_address(address.partition("%")[0])
    if configured == AUTO and number.is_loopback:  # also for 127.0.0.2, which no interface lists
        interface = LOOPBACK
    elif configured == AUTO:
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == str(number) for each in addresses):
                interface = str(name)
                break
        else:
            rule = f"must be named, since no interface of this host has the address {address}"
            if number.is_unspecified:
                rule = "must be named where the master listens on all addresses"
            raise ConfigError(_INTERFACE_KEY, rule, AUTO)
    interfaces = [name for _, name in socket.if_nameindex()]
    if interface not in interfaces:
        raise ConfigError(_INTERFACE_KEY, f"this host has {', '.join(interfaces)}", interface)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    return interface


def allow_open_files(cluster: ClusterSection) -> None:
    """Raise this process's limit of open files to the hard limit; HybridError if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    size = cluster.topology.world_size
    per_role = _FILES_PER_ROLE_BY_SHARED_MEMORY if polls_shared_memory(size) else _FILES_PER_ROLE
    needed = _FILES_ALONE + per_role * (size - 1)
    if resource.RLIM_INFINITY != hard < needed:
        raise HybridError(
            f"a role of {cluster.topology} needs about {needed} open files, and {hard} are allowed "
            "(ulimit -Hn); raise that, or start fewer roles"
        )
