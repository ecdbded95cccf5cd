"""What a role needs from its host: a network interface that others can reach, and enough open files.

Free of torch.
"""

import ipaddress
import os
import resource
import socket

import psutil

from hybrid.config import ClusterSection
from hybrid.errors import ConfigError, HybridError
from hybrid.topology import Role, polls_shared_memory
from workers.rendezvous.heartbeat import Acceptance

KEY, AUTO = "cluster.interface", "auto"
LOOPBACK = "lo"  # on every Linux
_LOOPBACK_FLAG = "loopback"
# Open files of the master, which has most of all roles: alone, and for each other role. Measured with 5 to 41
# roles (torch 2.13) and rounded up. A connection through shared memory takes 18 more, and there are two.
_FILES_ALONE = 120
_FILES_PER_ROLE, _FILES_PER_ROLE_BY_SHARED_MEMORY = 9, 48


def choose_interface(configured: str, address: str) -> str:
    """Return the interface of this process, and set the variables by which torch's process groups find it.

    Args:
        configured: ``cluster.interface``.
        address: of this host: the one on which the master listens, or from which a role has reached it.

    Raises:
        ConfigError: this host has no such interface, or none with that address.
    """
    interface, number = configured, ipaddress.ip_address(address.partition("%")[0])
    if configured == AUTO and number.is_loopback:  # also 127.0.0.2, which no interface lists
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
            raise ConfigError(KEY, rule, AUTO)
    interfaces = [name for _, name in socket.if_nameindex()]
    if interface not in interfaces:
        raise ConfigError(KEY, f"this host has {', '.join(interfaces)}", interface)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    return interface


def check_reachable(role: Role, interface: str, master: Acceptance) -> None:
    """Reject loopback interfaces for a role that is on another host than its master.

    Args:
        interface: the role's.

    Raises:
        ConfigError: no other host can reach the role's interface, or the master's.
    """
    here, there = f"{role} on host {socket.gethostname()}", f"the master on host {master.host}"
    remedies = {
        (here, interface): "leave it on auto, or name the one by which the others reach this host",
        (there, master.interface): f"leave it on auto there, or name the one by which {here} reaches it",
    }
    for (who, each), remedy in remedies.items():
        stats = psutil.net_if_stats().get(each)
        if each == LOOPBACK or (stats is not None and _LOOPBACK_FLAG in stats.flags.split(",")):
            rule = f"{who} would be reached by {each}, which no other host can reach; {remedy}"
            raise ConfigError(KEY, rule, each)


def files_needed(cluster: ClusterSection) -> int:
    """Return about how many open files a role of this cluster has at most."""
    size = cluster.topology.world_size
    per_role = _FILES_PER_ROLE_BY_SHARED_MEMORY if polls_shared_memory(size) else _FILES_PER_ROLE
    return _FILES_ALONE + per_role * (size - 1)


def allow_open_files(cluster: ClusterSection) -> None:
    """Raise the limit of open files of this process and its children to the hard limit.

    Raises:
        HybridError: the hard limit is less than a role needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = files_needed(cluster)
    if resource.RLIM_INFINITY != hard < needed:
        raise HybridError(
            f"a role of {cluster.topology} needs about {needed} open files, and {hard} are allowed "
            "(ulimit -Hn); raise that, or start fewer roles"
        )
