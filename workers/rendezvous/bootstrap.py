"""Form a cluster, and leave it.

::

    master                                   trainer i, worker j
    ──────                                   ───────────────────
    listens on the rendezvous port           connects, registers
    rejects a second role of one name, and
      other versions; else: configuration ──► reads it, chooses its interface
    waits for every role, names those        writes: host, pid, mounts
      that are missing after the timeout
    writes "go"                          ──► waits for it
                     all: connect once to each role of another host, join the RPC group

Every connection begins with a handshake (:mod:`workers.rendezvous.secure_channel`). The registration of a
role (:mod:`workers.rendezvous.heartbeat`) is its first heartbeat (:mod:`workers.rendezvous.heartbeat`).
"""

import dataclasses
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybrid import transport
from hybrid.config import RunConfig
from hybrid.config.loading import read_toml_text, to_toml, with_own
from hybrid.dense.devices import choose_backend, choose_devices
from hybrid.errors import ClusterError, first_line
from hybrid.security.closed_listeners import close_listeners_after
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind, Topology
from hybrid.transport.shared_memory.lent_blocks import own_network
from hybrid.transport.socket.handshake import address_of
from workers.controller.deployment import local_constructors
from workers.controller.shared_folders import filesystem_id
from workers.exit_codes import WARNING, ExitCode, StopMessage, exit_code
from workers.rendezvous.heartbeat import (
    Acceptance,
    HeartbeatInterval,
    HeartbeatSender,
    Registration,
    RegistrationPolicy,
    register,
)
from workers.rendezvous.host_requirements import allow_open_files, check_reachable, choose_interface
from workers.rendezvous.interrupt import Interrupter, StoppedError, last_words, run_interruptibly
from workers.rendezvous.master_address import MasterAddress
from workers.rendezvous.rendezvous_server import STOP, TWICE, VERDICT, RendezvousServer
from workers.rendezvous.rendezvous_store import RendezvousStore
from workers.rendezvous.secure_channel import Channel, connect
from workers.signals import STOP_REQUEST, forwarding_signals

# How long the master of a failed run waits for roles to learn the reason and leave.
_FAREWELL_SECONDS = 5.0
_LONGEST_WAIT = timedelta(minutes=1)
_RUN_ID_BYTES = 16
_GO = "go"
_HOSTS, _FAILURE = "hosts", "failure"
_BACKLOG = 1024
_LONGEST_ATTEMPT_SECONDS = 10.0  # in which the system sends four packets
_DONE = StopMessage()
# Until a role has the configuration.
_FIRST_INTERVAL = HeartbeatInterval(RunConfig().cluster.heartbeat_timeout_seconds)


@dataclass(frozen=True, slots=True)
class Member:
    """A role and its host.

    Attributes:
        files: see :func:`filesystem_id`; the same for roles that see the same files.
        network: see :func:`own_network`; the same for roles that reach each other by loopback.
    """

    host: str
    pid: int
    files: str
    network: str


@dataclass(frozen=True, slots=True)
class JoinedCluster:
    """A running cluster, as one of its roles sees it.

    Attributes:
        store: the cluster's key-value store.
        members: every other role; on the master only.
        rendezvous: the server; on the master only.
    """

    role: Role
    topology: Topology
    store: dist.Store
    members: dict[Role, Member]
    rendezvous: RendezvousServer | None = None


@contextmanager
def lead(
    config: RunConfig,
    secret: Secret,
    listener: socket.socket,
    code_of: Callable[[BaseException], ExitCode] = exit_code,
) -> Iterator[JoinedCluster]:
    """Form a cluster as its master, and leave it at the end; see :func:`join`.

    Args:
        listener: a listening socket for the rendezvous server.
        code_of: exit code of a cluster that an error ends.

    Raises:
        ClusterError: a role is missing, or was lost.
        ConfigError: this host has no such interface.
        HybridError: a role has other versions.
    """
    section = config.cluster
    address, port, *_ = listener.getsockname()
    interface = choose_interface(section.interface, address)
    torch.set_num_threads(section.threads)
    interrupter = Interrupter(f"hybrid {MASTER}", section.stop_timeout_seconds, code_of)
    interval = HeartbeatInterval(section.heartbeat_timeout_seconds)
    acceptance = Acceptance(to_toml(config), socket.gethostname(), own_network(), interface)
    policy = RegistrationPolicy(section.topology, acceptance, interrupter.interrupt)
    server = RendezvousServer(listener, secret, policy, interval, interrupter.interrupt, _signal_main_thread)
    with interrupter.enabled(), server as rendezvous:
        own_address, seconds = MasterAddress(address, port), section.start_timeout_seconds
        with _connected(partial(connect, own_address, secret, interval, seconds), seconds) as store:
            try:
                members = _gather(store, section.topology, section.start_timeout_seconds)
                cluster = JoinedCluster(MASTER, section.topology, store, members, rendezvous)
                with _in_groups(cluster, config, secret, interface, ()):
                    yield cluster
            except BaseException as error:
                rendezvous.stop(StopMessage(code_of(error), last_words(error)), _FAREWELL_SECONDS)
                raise
            # Roles need the store to leave the RPC group, until the last one has left.
            rendezvous.await_departures(section.timeout_seconds)


@contextmanager
def join(
    role: Role, address: MasterAddress, secret: Secret, settings: Sequence[str] = ()
) -> Iterator[JoinedCluster]:
    """Join a cluster as a trainer or a worker, and leave it at the end.

    After an error, end the process by :func:`end_now`: Python would wait for threads of torch, which may wait
    for a role that is gone.

    Args:
        address: of the master, which sends the configuration.
        settings: the role's own; see :func:`with_own`.

    Raises:
        ClusterError: there is no master, the role is taken, or another one was lost.
        ConfigError: a role may not have a setting, this host has no such interface, others cannot reach it,
            or the master has another secret.
        HybridError: there is no such role, or the master has other versions.
        StoppedError: the run has ended; see its exit code.
    """
    own = with_own(RunConfig(), settings).cluster
    channel = connect(address, secret, _FIRST_INTERVAL, own.start_timeout_seconds)
    try:
        master = register(channel, Registration.of(role))
        config = read_toml_text(master.config)
        channel.interval = interval = HeartbeatInterval(config.cluster.heartbeat_timeout_seconds)
    except BaseException:
        channel.close()
        raise
    interrupter = Interrupter(f"hybrid {role}", config.cluster.stop_timeout_seconds)
    with ExitStack() as stack:
        stack.enter_context(interrupter.enabled())
        heartbeat = stack.enter_context(HeartbeatSender(channel, interrupter.interrupt))
        stack.enter_context(forwarding_signals(heartbeat.forward_signal))
        config = with_own(config, settings)
        section = config.cluster
        allow_open_files(section)
        interface = choose_interface(section.interface, channel.local_address)
        if own_network() != master.network:
            check_reachable(role, interface, master)
        torch.set_num_threads(section.threads)
        seconds = section.start_timeout_seconds
        store = stack.enter_context(_connected(partial(connect, address, secret, interval, seconds), seconds))
        member = Member(socket.gethostname(), os.getpid(), filesystem_id(), own_network())
        store.set(f"member/{role}", json.dumps(dataclasses.astuple(member)))
        # The master names missing roles after its own timeout, so its message may come that much later.
        if not _appears(store, VERDICT, timedelta(seconds=2 * seconds)):
            raise ClusterError(f"no word from the master for {2 * seconds:g} s")
        if (verdict := store.get(VERDICT).decode()) != _GO:
            word = StopMessage.parse(verdict)
            raise StoppedError(f"stopped by the master: {word.reason}", word.code)
        cluster = JoinedCluster(role, section.topology, store, {})
        with _in_groups(cluster, config, secret, interface, local_constructors(settings)):
            yield cluster


@contextmanager
def _in_groups(
    cluster: JoinedCluster,
    config: RunConfig,
    secret: Secret,
    interface: str,
    constructors: Iterable[partial[Any]],
) -> Iterator[None]:
    """Join torch's groups with all roles, and leave them with all roles."""
    run_interruptibly(partial(_start_torch, cluster, config, secret, interface, constructors))
    yield
    try:
        run_interruptibly(partial(transport.stop, config.cluster.timeout_seconds))
    except RuntimeError as error:  # of torch, if another role has left early, which reports the reason
        raise StoppedError(f"another role went away: {first_line(error)}") from error
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _connected(connect: Callable[[], Channel], timeout_seconds: float) -> Iterator[RendezvousStore]:
    store = RendezvousStore(connect, timeout_seconds)
    try:
        yield store
    except dist.DistNetworkError as error:  # of any request to the store, torch's included
        raise StoppedError(f"the master went away: {first_line(error)}") from error
    finally:
        store.close()


def _appears(store: dist.Store, key: str, timeout: timedelta) -> bool:
    """Whether ``key`` exists within that time."""
    try:
        store.wait([key], timeout)
    except dist.DistStoreError:
        return False
    return True


def _start_torch(
    cluster: JoinedCluster,
    config: RunConfig,
    secret: Secret,
    interface: str,
    constructors: Iterable[partial[Any]],
) -> None:
    """Join the groups of torch; returns when every role has joined."""
    section = config.cluster
    role, store = cluster.role, cluster.store
    check_connections(role, store, interface, section.timeout_seconds)
    if role.kind is RoleKind.TRAINER:  # join the process group in which DDP reduces gradients
        device = choose_devices(config.dense, role.index)[0]
        store.set(f"device/{role.index}", f"{socket.gethostname()}/{device}")
        devices = [store.get(f"device/{i}").decode() for i in range(section.trainers)]
        names = dist.PrefixStore("trainers", store)
        with close_listeners_after(names, role.index, section.trainers):
            dist.init_process_group(
                choose_backend(devices),
                store=names,
                rank=role.index,
                world_size=section.trainers,
                timeout=timedelta(seconds=section.timeout_seconds),
            )
    transport.start(
        role,
        cluster.topology,
        store,
        secret=secret,
        run_id=store.get("run"),
        interface=interface,
        timeout_seconds=section.timeout_seconds,
        constructors=constructors,
    )


def check_connections(role: Role, store: dist.Store, interface: str, timeout_seconds: float) -> None:
    """Return once every role has connected to those of other hosts; at once if all are on one host.

    Process groups and RPC connect every pair of roles, on ports that the system chooses. If a firewall blocks
    them, torch waits long and names nobody. So the master collects the results of these attempts, and starts
    the cluster or names a pair that is blocked.

    Args:
        interface: on which others reach this role.
        timeout_seconds: of an attempt, up to ten seconds.

    Raises:
        ClusterError: two roles cannot connect.
    """
    hosts = json.loads(store.get(_HOSTS))
    if len({network for _, network in hosts.values()}) == 1:
        return
    family, address = address_of(interface)
    with socket.create_server((address, 0), family=family, backlog=_BACKLOG) as listener:
        store.set(f"address/{role}", json.dumps(listener.getsockname()[:2]))
        failure = ""
        here, network = hosts[str(role)]
        for other, (there, others_network) in hosts.items():
            if failure or others_network == network:
                continue
            others_address = tuple(json.loads(store.get(f"address/{other}")))
            seconds = min(timeout_seconds, _LONGEST_ATTEMPT_SECONDS)
            try:
                socket.create_connection(others_address, seconds, source_address=(address, 0)).close()
            except OSError as error:
                host, port = others_address
                failure = (
                    f"{role} on host {here} cannot reach {other} on host {there} at {host}:{port} "
                    f"({error.strerror or first_line(error)}); is there a firewall between them? "
                    "Roles connect to each other on any port"
                )
        store.set(f"failure/{role}", failure)
        if role == MASTER:
            all_failures = [store.get(f"failure/{each}").decode() for each in hosts]
            store.set(_FAILURE, next(filter(None, all_failures), ""))
        first_failure = store.get(_FAILURE).decode()
    if first_failure and role == MASTER:
        raise ClusterError(first_failure)
    if first_failure:  # the master reports it
        raise StoppedError(failure or f"stopped by the master: {first_failure}")


def _signal_main_thread(number: int) -> None:
    """Stop the master, since a signal asked another role to stop."""
    ours = number if number == WARNING else STOP_REQUEST
    signal.pthread_kill(threading.main_thread().ident or 0, ours)


def announce_stop(cluster: JoinedCluster, word: StopMessage = _DONE) -> None:
    """Make every role stop; called by the master."""
    if not word.reason:
        cluster.store.set(STOP, str(word))
    elif cluster.rendezvous is not None:
        cluster.rendezvous.stop(word, _FAREWELL_SECONDS)


def await_stop(cluster: JoinedCluster) -> ExitCode:
    """Wait until the master announces the end, and serve calls meanwhile; return the exit code.

    Raises:
        ClusterError: the run failed, or the master went away.
    """
    while not _appears(cluster.store, STOP, _LONGEST_WAIT):
        pass
    word = StopMessage.parse(cluster.store.get(STOP).decode())
    if word.reason:
        raise StoppedError(f"stopped by the master: {word.reason}", word.code)
    return word.code


def _gather(store: dist.Store, topology: Topology, timeout_seconds: float) -> dict[Role, Member]:
    """Wait for every role; ClusterError if one is missing."""
    roles = [*topology.trainers, *topology.workers]
    deadline = time.monotonic() + timeout_seconds
    for role in roles:
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        if not _appears(store, f"member/{role}", left):
            missing = ", ".join(str(each) for each in roles if not store.check([f"member/{each}"]))
            twice = ", ".join(str(each) for each in roles if store.check([f"{TWICE}/{each}"]))
            hint = f"; started twice: {twice}" if twice else ""
            limit = f"{timeout_seconds:g} s (cluster.start_timeout_seconds)"
            raise ClusterError(f"missing after {limit}: {missing}{hint}")
    members = {role: Member(*json.loads(store.get(f"member/{role}"))) for role in roles}
    hosts = {str(role): (each.host, each.network) for role, each in members.items()}
    store.set(_HOSTS, json.dumps({str(MASTER): (socket.gethostname(), own_network())} | hosts))
    store.set("run", secrets.token_hex(_RUN_ID_BYTES))
    store.set(VERDICT, _GO)
    return members
