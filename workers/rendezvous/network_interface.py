"""The network interface of all of a role's traffic, and whether others can reach it. Free of torch."""

import ipaddress
import os
import socket

import psutil

from hybrid.errors import ConfigError
from hybrid.topology import Role
from workers.rendezvous.registration import Welcome

KEY, AUTO = "cluster.interface", "auto"
LOOPBACK = "lo"  # of every Linux
_LOOPBACK_FLAG = "loopback"


def choose_interface(wanted: str, address: str) -> str:
    """The interface of this process, which the process groups of torch are told by their variables.

    Args:
        wanted: ``cluster.interface``.
        address: of this host; the one on which the master listens, or from which a role has reached it.

    Raises:
        ConfigError: this host has no such interface, or none of that address.
    """
    interface = _holder(address) if wanted == AUTO else wanted
    interfaces = [name for _, name in socket.if_nameindex()]
    if interface not in interfaces:
        raise ConfigError(KEY, f"this host has {', '.join(interfaces)}", interface)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    return interface


def _holder(address: str) -> str:
    """The interface that has an address of this host."""
    number = ipaddress.ip_address(address.partition("%")[0])
    if number.is_loopback:  # 127.0.0.2 is, and no interface names it
        return LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == str(number) for each in addresses):
            return str(name)
    rule = f"must be named, since no interface of this host has the address {address}"
    if number.is_unspecified:
        rule = "must be named where the master listens on all addresses"
    raise ConfigError(KEY, rule, AUTO)


def check_reachable(role: Role, interface: str, welcome: Welcome) -> None:
    """Refuse what one host alone can do, where a role is on another than its master.

    Args:
        interface: this role's.

    Raises:
        ConfigError: its interface, or the master's, is one that no other host can reach.
    """
    here, there = f"{role} on host {socket.gethostname()}", f"the master on host {welcome.host}"
    remedies = {
        (here, interface): "leave it on auto, or name the one by which the others reach this host",
        (there, welcome.interface): f"leave it on auto there, or name the one by which {here} reaches it",
    }
    for (who, each), remedy in remedies.items():
        if _is_loopback(each):
            rule = f"{who} would be reached by {each}, which no other host can reach; {remedy}"
            raise ConfigError(KEY, rule, each)


def _is_loopback(interface: str) -> bool:
    stats = psutil.net_if_stats().get(interface)
    return interface == LOOPBACK or (stats is not None and _LOOPBACK_FLAG in stats.flags.split(","))
