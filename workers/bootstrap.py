"""How the processes of a cluster find each other.

::

    master                                   trainer i, worker j
    ──────                                   ───────────────────
    listens on the rendezvous port           connects, claims its role (once only)
    waits for every role, names those        writes: host, pid, configuration
      that are missing after a stated time
    compares configurations, says "go"  ───► waits for the master's word; says that it has heard a "no"
                     all: join the RPC group

The rendezvous is a torch ``TCPStore``. The master hands it a socket bound to the configured address;
left to itself the store would listen on every interface.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from hybrid import wire
from hybrid.config import ClusterSection, RunConfig
from hybrid.config_file import decisive_values
from hybrid.dense.device import choose_backend, choose_devices
from hybrid.errors import ClusterError, ConfigError, first_line
from hybrid.topology import MASTER, Role, RoleKind, Topology

_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 1.0
_FAREWELL_SECONDS = 1.0
_GO = "go"
_DONE = "done"


class StoppedError(ClusterError):
    """The run failed elsewhere; this role is only told so."""


@dataclass(frozen=True, slots=True)
class Member:
    """One role as it presented itself."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """A process's place in a running cluster.

    Attributes:
        store: the cluster's key-value store.
        members: every role with its host and pid; only the master knows them.
    """

    role: Role
    topology: Topology
    store: dist.Store
    members: dict[Role, Member]


@contextmanager
def join(role: Role, config: RunConfig, listener: socket.socket | None = None) -> Iterator[Cluster]:
    """Join the cluster as ``role``, and leave it at the end: in order, or at once on an error.

    Args:
        listener: the master's listening socket, which becomes the store's; None for other roles.

    Raises:
        ClusterError: a role is missing or taken, or runs another configuration.
        ConfigError: this host has no such interface.
    """
    section = config.cluster
    interfaces = [name for _, name in socket.if_nameindex()]
    if section.interface not in interfaces:
        raise ConfigError("cluster.interface", f"this host has {', '.join(interfaces)}", section.interface)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = section.interface
    topology = section.topology
    members: dict[Role, Member] = {}
    if role == MASTER:
        assert listener is not None, "the master brings its socket"
        store = _serve(listener, section)
        members = _gather(store, topology, decisive_values(config), section.start_timeout_seconds)
    else:
        store = _connect(section)
        _present(store, role, decisive_values(config))
        _await_go(store, role, section.start_timeout_seconds)
    if role.kind is RoleKind.TRAINER:
        _join_trainers(store, role, config)
    wire.start(
        role,
        topology,
        store,
        interface=section.interface,
        transport=section.transport,
        timeout_seconds=section.rpc_timeout_seconds,
    )
    graceful = False
    try:
        yield Cluster(role, topology, store, members)
        graceful = True
    finally:
        wire.stop(section.rpc_timeout_seconds, graceful)
        if dist.is_initialized():
            dist.destroy_process_group()
        # To leave the RPC group in peace takes the store, until the last role has left.
        if graceful and role != MASTER:
            _leave(store, role)
        elif graceful:
            _await_left(store, members, section.rpc_timeout_seconds)


def _serve(listener: socket.socket, section: ClusterSection) -> dist.Store:
    port = listener.getsockname()[1]
    return dist.TCPStore(
        section.master_address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=section.start_timeout_seconds),
        master_listen_fd=listener.detach(),
    )


def _connect(section: ClusterSection) -> dist.Store:
    """Connect to the master's store, which may not be there yet."""
    address, port = section.master_address, section.master_port
    deadline = time.monotonic() + section.start_timeout_seconds
    while True:
        # A plain connection first: the store's own attempts log a stack for every refusal.
        try:
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"no master at {address}:{port} after {section.start_timeout_seconds:g} s ({error}); "
                    "start it, or check cluster.master_address and cluster.master_port"
                ) from error
            time.sleep(_POLL_SECONDS)
    timeout = timedelta(seconds=section.start_timeout_seconds)
    return dist.TCPStore(address, port, is_master=False, timeout=timeout)


def _present(store: dist.Store, role: Role, values: dict[str, Any]) -> None:
    if store.add(f"claim/{role}", 1) > 1:
        raise ClusterError(f"{role} is already taken in this cluster: was it started twice?")
    store.set(f"member/{role}", json.dumps([socket.gethostname(), os.getpid(), values]))


def _await_go(store: dist.Store, role: Role, timeout_seconds: float) -> None:
    # The master names the missing after its own timeout; its word may come that much later.
    deadline = time.monotonic() + 2 * timeout_seconds
    while not _has(store, "verdict"):
        if time.monotonic() > deadline:
            raise ClusterError(f"no word from the master for {2 * timeout_seconds:g} s")
    verdict = store.get("verdict").decode()
    if verdict != _GO:
        _leave(store, role)
        raise StoppedError(f"stopped by the master: {verdict}")


def _has(store: dist.Store, key: str) -> bool:
    """Whether ``key`` is there; pauses a little where it is not, so that it can be called in a loop."""
    try:
        # Not store.wait: it cannot be interrupted, and logs a warning whenever its time runs out.
        if store.check([key]):
            return True
    except dist.DistError as error:
        raise StoppedError(f"the master went away: {first_line(error)}") from error
    time.sleep(_POLL_SECONDS)
    return False


def _join_trainers(store: dist.Store, role: Role, config: RunConfig) -> None:
    """Form the trainers' process group, in which DDP reduces gradients."""
    section = config.cluster
    device = choose_devices(config.dense, role.index)[0]
    store.set(f"device/{role.index}", f"{socket.gethostname()}/{device}")
    devices = [store.get(f"device/{i}").decode() for i in range(section.trainers)]
    dist.init_process_group(
        choose_backend(devices),
        store=dist.PrefixStore("trainers", store),
        rank=role.index,
        world_size=section.trainers,
        timeout=timedelta(seconds=section.rpc_timeout_seconds),
    )


def announce_stop(cluster: Cluster, reason: str = _DONE) -> None:
    """Tell every role to stop; called by the master, with a reason where the run failed."""
    cluster.store.set("stop", reason)
    if reason != _DONE:
        _await_left(cluster.store, cluster.members, _FAREWELL_SECONDS)


def await_stop(cluster: Cluster) -> None:
    """Wait for the master's word to stop, answering calls meanwhile.

    Raises:
        ClusterError: the run failed, or the master went away.
    """
    while not _has(cluster.store, "stop"):
        pass
    reason = cluster.store.get("stop").decode()
    if reason != _DONE:
        _leave(cluster.store, cluster.role)
        raise StoppedError(f"stopped by the master: {reason}")


def _leave(store: dist.Store, role: Role) -> None:
    """Say that this role is done with the store."""
    store.set(f"left/{role}", "")


def _await_left(store: dist.Store, roles: Iterable[Role], timeout_seconds: float) -> None:
    """Stay until ``roles`` are done with the store, which ends with this process."""
    deadline = time.monotonic() + timeout_seconds
    for role in roles:
        while not _has(store, f"left/{role}") and time.monotonic() < deadline:
            pass


def _gather(
    store: dist.Store, topology: Topology, values: dict[str, Any], timeout_seconds: float
) -> dict[Role, Member]:
    """Wait for every role; ClusterError, told to those that are there, where one is missing or differs."""
    roles = [*topology.trainers, *topology.workers]
    deadline = time.monotonic() + timeout_seconds
    for role in roles:
        while not _has(store, f"member/{role}"):
            if time.monotonic() > deadline:
                _refuse(store, roles, _who_is_missing(store, roles, timeout_seconds))
    members = {}
    for role in roles:
        host, pid, theirs = json.loads(store.get(f"member/{role}"))
        members[role] = Member(host, pid)
        for key in [key for key in values | theirs if values.get(key) != theirs.get(key)][:1]:
            there, here = theirs.get(key), values.get(key)
            _refuse(store, roles, f"{role} on {host} has {key} = {there!r}, the master {here!r}")
    store.set("verdict", _GO)
    return members


def _who_is_missing(store: dist.Store, roles: list[Role], timeout_seconds: float) -> str:
    missing = ", ".join(str(role) for role in roles if not store.check([f"member/{role}"]))
    twice = ", ".join(str(role) for role in roles if store.add(f"claim/{role}", 0) > 1)
    hint = f"; started twice: {twice}" if twice else ""
    return f"missing after {timeout_seconds:g} s (cluster.start_timeout_seconds): {missing}{hint}"


def _refuse(store: dist.Store, roles: list[Role], reason: str) -> NoReturn:
    store.set("verdict", reason)
    present = [role for role in roles if store.check([f"member/{role}"])]
    _await_left(store, present, _FAREWELL_SECONDS)
    raise ClusterError(reason)
