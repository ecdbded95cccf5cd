"""A check before torch starts that the roles of different hosts can connect to each other.

Process groups and RPC connect every pair of roles, on ports that the system chooses. If a firewall blocks
them, torch waits long and names nobody. So each role first connects once to each role of another host. The
master collects the results, and starts the cluster or names a pair that is blocked.
"""

import json
import socket
from collections.abc import Mapping
from typing import TypeAlias

import torch.distributed as dist

from hybrid.errors import ClusterError, first_line
from hybrid.topology import MASTER, Role
from hybrid.transport.socket.handshake import address_of
from workers.rendezvous.interrupt import StoppedError

# By role: the name of its host, and its own_network().
Hosts: TypeAlias = Mapping[str, tuple[str, str]]

_HOSTS, _FAILURE = "places", "ways"
_BACKLOG = 1024
_LONGEST_SECONDS = 10.0  # of one attempt, in which the system sends four packets


def publish_hosts(store: dist.Store, hosts: Hosts) -> None:
    """Tell all roles where each one is; called by the master."""
    store.set(_HOSTS, json.dumps(hosts))


def check_connections(role: Role, store: dist.Store, interface: str, timeout_seconds: float) -> None:
    """Return once every role has reached those of other hosts; at once if all are on one host.

    Args:
        interface: on which others reach this role.
        timeout_seconds: of an attempt, up to ten seconds.

    Raises:
        ClusterError: two roles cannot connect.
    """
    hosts: Hosts = json.loads(store.get(_HOSTS))
    if len({network for _, network in hosts.values()}) == 1:
        return
    family, address = address_of(interface)
    with socket.create_server((address, 0), family=family, backlog=_BACKLOG) as listener:
        store.set(f"way/{role}", json.dumps(listener.getsockname()[:2]))
        failure = ""
        here, network = hosts[str(role)]
        for other, (there, others_network) in hosts.items():
            if failure or others_network == network:
                continue
            others_address = tuple(json.loads(store.get(f"way/{other}")))
            seconds = min(timeout_seconds, _LONGEST_SECONDS)
            try:
                socket.create_connection(others_address, seconds, source_address=(address, 0)).close()
            except OSError as error:
                host, port = others_address
                failure = (
                    f"{role} on host {here} cannot reach {other} on host {there} at {host}:{port} "
                    f"({error.strerror or first_line(error)}); is there a firewall between them? "
                    "Roles connect to each other on any port"
                )
        store.set(f"tried/{role}", failure)
        if role == MASTER:
            all_failures = [store.get(f"tried/{each}").decode() for each in hosts]
            store.set(_FAILURE, next(filter(None, all_failures), ""))
        first_failure = store.get(_FAILURE).decode()
    if first_failure and role == MASTER:
        raise ClusterError(first_failure)
    if first_failure:  # the master reports it
        raise StoppedError(failure or f"stopped by the master: {first_failure}")
