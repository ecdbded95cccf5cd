"""The ways between hosts, tried before torch takes them: where one is closed, it waits long and names nobody.

Process groups and RPC connect every role to every other, on ports that the system hands out. So does each
role here, once, to the roles of other hosts. The master hears what came of it, and says go, or which two
roles do not reach each other; until then everybody can be reached.
"""

import json
import socket
from collections.abc import Mapping
from typing import TypeAlias

import torch.distributed as dist

from hybrid.errors import ClusterError, first_line
from hybrid.topology import MASTER, Role
from hybrid.transport.socket.connection_setup import address_of
from workers.rendezvous.interrupt import StoppedError

# By role: its host, and what own_network() says there.
Places: TypeAlias = Mapping[str, tuple[str, str]]

_PLACES, _FOUND = "places", "ways"
_MOST_WAITING = 1024
_LONGEST_SECONDS = 10.0  # of one attempt, in which the system asks four times


def tell_places(store: dist.Store, places: Places) -> None:
    """Tell all roles where each is; called by the master."""
    store.set(_PLACES, json.dumps(places))


def try_ways(role: Role, store: dist.Store, interface: str, timeout_seconds: float) -> None:
    """Return once every role has reached those of other hosts; at once where all are on one host.

    Args:
        interface: on which this role is reached.
        timeout_seconds: of an attempt, if that is not long.

    Raises:
        ClusterError: two roles do not reach each other.
    """
    places: Places = json.loads(store.get(_PLACES))
    if len({network for _, network in places.values()}) == 1:
        return
    family, address = address_of(interface)
    with socket.create_server((address, 0), family=family, backlog=_MOST_WAITING) as listener:
        store.set(f"way/{role}", json.dumps(listener.getsockname()[:2]))
        failure = _failure(str(role), places, store, address, min(timeout_seconds, _LONGEST_SECONDS))
        store.set(f"tried/{role}", failure)
        if role == MASTER:
            all_failures = [store.get(f"tried/{each}").decode() for each in places]
            store.set(_FOUND, next(filter(None, all_failures), ""))
        found = store.get(_FOUND).decode()
    if found and role == MASTER:
        raise ClusterError(found)
    if found:  # the master knows it already
        raise StoppedError(failure or f"stopped by the master: {found}")


def _failure(role: str, places: Places, store: dist.Store, own_address: str, timeout_seconds: float) -> str:
    """Whom a role does not reach, of those on other hosts, and where; empty where it reaches all."""
    here, network = places[role]
    for other, (there, others_network) in places.items():
        if others_network == network:
            continue
        address, port = json.loads(store.get(f"way/{other}"))
        try:
            socket.create_connection(
                (address, port), timeout_seconds, source_address=(own_address, 0)
            ).close()
        except OSError as error:
            why = error.strerror or first_line(error)
            return (
                f"{role} on host {here} cannot reach {other} on host {there} at {address}:{port} ({why}); is "
                "there a firewall between them? Roles connect to each other on any port"
            )
    return ""
