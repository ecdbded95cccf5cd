"""How the processes of a cluster find each other.

::

    master                                   trainer i, worker j
    ──────                                   ───────────────────
    listens on the rendezvous port           connects, claims its role (once only)
    waits for every role, names those        writes: host, pid, configuration
      that are missing after a stated time
    compares configurations, says "go"  ───► waits for the master's word
                     all: join the RPC group

Every connection begins with a proof of the cluster's secret (:mod:`workers.joining.channel`). The claim is
a role's first sign of life (:mod:`workers.joining.heartbeat`).
"""

import dataclasses
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from hybrid import wire
from hybrid.config import ClusterSection, RunConfig
from hybrid.config.file import decisive_values
from hybrid.dense.device import choose_backend, choose_devices
from hybrid.errors import ClusterError, ConfigError, first_line
from hybrid.topology import MASTER, Role, RoleKind, Topology
from hybrid.trust.secret import Secret
from hybrid.trust.sockets import closed_after
from workers.joining.alarm import Alarm, StoppedError, last_words, run_interruptibly
from workers.joining.channel import Channel
from workers.joining.heartbeat import Pulse
from workers.joining.rendezvous import STOP, TWICE, VERDICT, Rendezvous
from workers.joining.rhythm import Rhythm
from workers.joining.store import Store
from workers.session.deployment import CREATED, DATA

_POLL_SECONDS = 0.05
_FAREWELL_SECONDS = 1.0
_LONGEST_WAIT = timedelta(minutes=1)
_RUN_ID_BYTES = 16
_GO = "go"
_DONE = "done"


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
        members: every other role with its host and pid; only the master knows them.
        rendezvous: where all others meet; only the master has it.
    """

    role: Role
    topology: Topology
    store: dist.Store
    members: dict[Role, Member]
    rendezvous: Rendezvous | None = None


@contextmanager
def join(
    role: Role, config: RunConfig, secret: Secret, listener: socket.socket | None = None
) -> Iterator[Cluster]:
    """Join the cluster as ``role``, and leave it at the end.

    After an error the process is to end at once, and not as Python ends one: threads of torch may wait for a
    role that is gone, and Python for them.

    Args:
        listener: the master's listening socket, which becomes the rendezvous; None for other roles.

    Raises:
        ClusterError: a role is missing or taken, runs another configuration, or was lost.
        ConfigError: this host has no such interface, or the master has another secret.
    """
    section = config.cluster
    _choose_interface(section.interface)
    alarm = Alarm(f"hybrid {role}", section.stop_timeout_seconds)
    with alarm.armed():
        if role == MASTER:
            assert listener is not None, "the master brings its socket"
            membership = _host(config, secret, listener, alarm)
        else:
            membership = _enter(role, config, secret, alarm)
        with membership as cluster:
            run_interruptibly(partial(_start_torch, cluster, config, secret))
            yield cluster
            _leave(section.rpc_timeout_seconds)
            if dist.is_initialized():
                dist.destroy_process_group()


def _leave(timeout_seconds: float) -> None:
    """Leave the RPC group, when every role does."""
    try:
        run_interruptibly(partial(wire.stop, timeout_seconds))
    except RuntimeError as error:  # torch's, where another role has gone before its time: it says why
        raise StoppedError(f"another role went away: {first_line(error)}") from error


def _choose_interface(interface: str) -> None:
    interfaces = [name for _, name in socket.if_nameindex()]
    if interface not in interfaces:
        raise ConfigError("cluster.interface", f"this host has {', '.join(interfaces)}", interface)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


@contextmanager
def _host(config: RunConfig, secret: Secret, listener: socket.socket, alarm: Alarm) -> Iterator[Cluster]:
    """The master's place in the cluster, once every role is there."""
    section = config.cluster
    section = dataclasses.replace(section, master_port=listener.getsockname()[1])
    rhythm = Rhythm(section.heartbeat_timeout_seconds)
    with Rendezvous(listener, secret, rhythm, alarm.ring) as rendezvous:
        with _connected(section, secret, rhythm) as store:
            try:
                members = _gather(
                    store, section.topology, decisive_values(config), section.start_timeout_seconds
                )
                yield Cluster(MASTER, section.topology, store, members, rendezvous)
            except BaseException as error:
                rendezvous.stop(last_words(error), _FAREWELL_SECONDS)
                raise
            # To leave the RPC group in peace takes the store, until the last role has left.
            rendezvous.await_left(section.rpc_timeout_seconds)


@contextmanager
def _enter(role: Role, config: RunConfig, secret: Secret, alarm: Alarm) -> Iterator[Cluster]:
    """Another role's place in the cluster, once the master says go."""
    section = config.cluster
    rhythm = Rhythm(section.heartbeat_timeout_seconds)
    with (
        Pulse(_connect(section, secret, rhythm), role, rhythm, alarm.ring),
        _connected(section, secret, rhythm) as store,
    ):
        store.set(f"member/{role}", json.dumps([socket.gethostname(), os.getpid(), decisive_values(config)]))
        _await_go(store, section.start_timeout_seconds)
        yield Cluster(role, section.topology, store, {})


def _connect(section: ClusterSection, secret: Secret, rhythm: Rhythm) -> Channel:
    """Connect to the master, which may not be there yet; one that is there and says nothing is frozen."""
    address, port = section.master_address, section.master_port
    deadline = time.monotonic() + section.start_timeout_seconds
    while True:
        try:
            return Channel(address, port, secret, rhythm)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"no master at {address}:{port} after {section.start_timeout_seconds:g} s ({error}); "
                    "start it, or check cluster.master_address and cluster.master_port"
                ) from error
            time.sleep(_POLL_SECONDS)


@contextmanager
def _connected(section: ClusterSection, secret: Secret, rhythm: Rhythm) -> Iterator[Store]:
    store = Store(lambda: _connect(section, secret, rhythm), section.start_timeout_seconds)
    try:
        yield store
    except dist.DistNetworkError as error:  # of whatever has asked the store, torch too
        raise StoppedError(f"the master went away: {first_line(error)}") from error
    finally:
        store.close()


def _await_go(store: dist.Store, timeout_seconds: float) -> None:
    # The master names the missing after its own timeout; its word may come that much later.
    if not _appears(store, VERDICT, timedelta(seconds=2 * timeout_seconds)):
        raise ClusterError(f"no word from the master for {2 * timeout_seconds:g} s")
    verdict = store.get(VERDICT).decode()
    if verdict != _GO:
        raise StoppedError(f"stopped by the master: {verdict}")


def _appears(store: dist.Store, key: str, timeout: timedelta) -> bool:
    """Whether ``key`` is there within that time."""
    try:
        store.wait([key], timeout)
    except dist.DistStoreError:
        return False
    return True


def _start_torch(cluster: Cluster, config: RunConfig, secret: Secret) -> None:
    """Form the groups of torch; returns when every role has joined."""
    section = config.cluster
    if cluster.role.kind is RoleKind.TRAINER:
        _join_trainers(cluster.store, cluster.role, config)
    wire.start(
        cluster.role,
        cluster.topology,
        cluster.store,
        secret=secret,
        run_id=cluster.store.get("run"),
        interface=section.interface,
        transport=section.transport,
        carrier=section.carrier,
        timeout_seconds=section.rpc_timeout_seconds,
        data=DATA,
        created=CREATED,
    )


def _join_trainers(store: dist.Store, role: Role, config: RunConfig) -> None:
    """Form the trainers' process group, in which DDP reduces gradients."""
    section = config.cluster
    device = choose_devices(config.dense, role.index)[0]
    store.set(f"device/{role.index}", f"{socket.gethostname()}/{device}")
    devices = [store.get(f"device/{i}").decode() for i in range(section.trainers)]
    names = dist.PrefixStore("trainers", store)
    with closed_after(names, role.index, section.trainers):
        dist.init_process_group(
            choose_backend(devices),
            store=names,
            rank=role.index,
            world_size=section.trainers,
            timeout=timedelta(seconds=section.rpc_timeout_seconds),
        )


def announce_stop(cluster: Cluster, reason: str = _DONE) -> None:
    """Tell every role to stop; called by the master, with a reason where the run failed."""
    if reason == _DONE:
        cluster.store.set(STOP, _DONE)
    elif cluster.rendezvous is not None:
        cluster.rendezvous.stop(reason, _FAREWELL_SECONDS)


def await_stop(cluster: Cluster) -> None:
    """Wait for the master's word to stop, answering calls meanwhile.

    Raises:
        ClusterError: the run failed, or the master went away.
    """
    while not _appears(cluster.store, STOP, _LONGEST_WAIT):
        pass
    reason = cluster.store.get(STOP).decode()
    if reason != _DONE:
        raise StoppedError(f"stopped by the master: {reason}")


def _gather(
    store: dist.Store, topology: Topology, values: dict[str, Any], timeout_seconds: float
) -> dict[Role, Member]:
    """Wait for every role; ClusterError where one is missing or differs."""
    roles = [*topology.trainers, *topology.workers]
    deadline = time.monotonic() + timeout_seconds
    for role in roles:
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        if not _appears(store, f"member/{role}", left):
            raise ClusterError(_who_is_missing(store, roles, timeout_seconds))
    members = {}
    for role in roles:
        host, pid, theirs = json.loads(store.get(f"member/{role}"))
        members[role] = Member(host, pid)
        for key in [key for key in values | theirs if values.get(key) != theirs.get(key)][:1]:
            there, here = theirs.get(key), values.get(key)
            raise ClusterError(f"{role} on {host} has {key} = {there!r}, the master {here!r}")
    store.set("run", secrets.token_hex(_RUN_ID_BYTES))
    store.set(VERDICT, _GO)
    return members


def _who_is_missing(store: dist.Store, roles: list[Role], timeout_seconds: float) -> str:
    missing = ", ".join(str(role) for role in roles if not store.check([f"member/{role}"]))
    twice = ", ".join(str(role) for role in roles if store.check([f"{TWICE}/{role}"]))
    hint = f"; started twice: {twice}" if twice else ""
    return f"missing after {timeout_seconds:g} s (cluster.start_timeout_seconds): {missing}{hint}"
