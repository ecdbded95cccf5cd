"""How the processes of a cluster find each other.

::

    master                                   trainer i, worker j
    ──────                                   ───────────────────
    listens on the rendezvous port           connects, claims its role
    refuses one that is taken, or of other
      versions; else: the configuration ───► takes it, chooses its interface
    waits for every role, names those        writes: host, pid, mounts
      that are missing after a stated time
    says "go"                           ───► waits for the master's word
                     all: join the RPC group

Every connection begins with a proof of the cluster's secret (:mod:`workers.rendezvous.channel`). The claim is
a role's first sign of life (:mod:`workers.rendezvous.heartbeat`); what is said of it is in
:mod:`workers.rendezvous.registration`.
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
from hybrid.transport.socket.lent_blocks import own_network
from workers.controller.deployment import local_constructors
from workers.controller.shared_folders import own_files
from workers.exit_codes import WARNING, ExitCode, Word, exit_code
from workers.rendezvous.address import Address
from workers.rendezvous.channel import Channel
from workers.rendezvous.file_limit import allow_open_files
from workers.rendezvous.heartbeat import Pulse, claim_place
from workers.rendezvous.heartbeat_interval import Rhythm
from workers.rendezvous.interrupt import Alarm, StoppedError, last_words, run_interruptibly
from workers.rendezvous.master_connection import connect
from workers.rendezvous.network_interface import check_reachable, choose_interface
from workers.rendezvous.reachability import tell_places, try_ways
from workers.rendezvous.registration import Admission, Claim, Welcome
from workers.rendezvous.rendezvous_server import STOP, TWICE, VERDICT, Rendezvous
from workers.rendezvous.rendezvous_store import Store
from workers.signals import ASK_SIGNAL, passing_on

# How long a failed run's master stays for roles to be told why, on a busy machine too; they leave at once.
_FAREWELL_SECONDS = 5.0
_LONGEST_WAIT = timedelta(minutes=1)
_RUN_ID_BYTES = 16
_GO = "go"
_DONE = Word()
# How long a master may say nothing, until it has said how long it may.
_FIRST_RHYTHM = Rhythm(RunConfig().cluster.heartbeat_timeout_seconds)


@dataclass(frozen=True, slots=True)
class Member:
    """One role as it presented itself.

    Attributes:
        files: see :func:`own_files`; the same for those who see the same ones.
        network: see :func:`own_network`; the same for those who reach each other by loopback.
    """

    host: str
    pid: int
    files: str
    network: str


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
def lead(
    config: RunConfig,
    secret: Secret,
    listener: socket.socket,
    code_of: Callable[[BaseException], ExitCode] = exit_code,
) -> Iterator[Cluster]:
    """Gather the cluster of a configuration as its master, and leave it at the end; see :func:`join`.

    Args:
        listener: a listening socket, which becomes the rendezvous.
        code_of: the exit code of a cluster that is ended by an error.

    Raises:
        ClusterError: a role is missing, or was lost.
        ConfigError: this host has no such interface.
        HybridError: a role has other versions.
    """
    section = config.cluster
    address, port, *_ = listener.getsockname()
    interface = choose_interface(section.interface, address)
    torch.set_num_threads(section.threads)
    alarm = Alarm(f"hybrid {MASTER}", section.stop_timeout_seconds, code_of)
    rhythm = Rhythm(section.heartbeat_timeout_seconds)
    welcome = Welcome(to_toml(config), socket.gethostname(), own_network(), interface)
    admission = Admission(section.topology, welcome, alarm.ring)
    meeting = Rendezvous(listener, secret, admission, rhythm, alarm.ring, _stop_as_well)
    with alarm.armed(), meeting as rendezvous:
        reach = partial(
            connect, Address(address, port), secret, rhythm, timeout_seconds=section.start_timeout_seconds
        )
        with _connected(reach, section.start_timeout_seconds) as store:
            try:
                members = _gather(store, section.topology, section.start_timeout_seconds)
                cluster = Cluster(MASTER, section.topology, store, members, rendezvous)
                with _in_groups(cluster, config, secret, interface, ()):
                    yield cluster
            except BaseException as error:
                rendezvous.stop(Word(code_of(error), last_words(error)), _FAREWELL_SECONDS)
                raise
            # To leave the RPC group in peace takes the store, until the last role has left.
            rendezvous.await_left(section.timeout_seconds)


@contextmanager
def join(role: Role, address: Address, secret: Secret, settings: Sequence[str] = ()) -> Iterator[Cluster]:
    """Join a cluster as a trainer or a worker, and leave it at the end.

    After an error the process is to end at once, and not as Python ends one: threads of torch may wait for a
    role that is gone, and Python for them.

    Args:
        address: of the master, which has everything else to say.
        settings: what this role was given of its own; see :func:`with_own`.

    Raises:
        ClusterError: there is no master, the role is taken, or another one was lost.
        ConfigError: a setting is not for a role to have, this host has no such interface, or others cannot
            reach it there, or the master has another secret.
        HybridError: there is no such role, or the master has other versions.
        StoppedError: the run is over; its code says how.
    """
    own = with_own(RunConfig(), settings).cluster
    channel = connect(address, secret, _FIRST_RHYTHM, own.start_timeout_seconds)
    try:
        welcome = claim_place(channel, Claim.of(role))
        config = read_toml_text(welcome.config)
        channel.rhythm = rhythm = Rhythm(config.cluster.heartbeat_timeout_seconds)
    except BaseException:
        channel.close()
        raise
    alarm = Alarm(f"hybrid {role}", config.cluster.stop_timeout_seconds)
    with ExitStack() as stack:
        stack.enter_context(alarm.armed())
        pulse = stack.enter_context(Pulse(channel, alarm.ring))
        stack.enter_context(passing_on(pulse.pass_on))
        config = with_own(config, settings)
        section = config.cluster
        allow_open_files(section)
        interface = choose_interface(section.interface, channel.local_address)
        if own_network() != welcome.network:
            check_reachable(role, interface, welcome)
        torch.set_num_threads(section.threads)
        reach = partial(connect, address, secret, rhythm, timeout_seconds=section.start_timeout_seconds)
        store = stack.enter_context(_connected(reach, section.start_timeout_seconds))
        member = Member(socket.gethostname(), os.getpid(), own_files(), own_network())
        store.set(f"member/{role}", json.dumps(dataclasses.astuple(member)))
        _await_go(store, section.start_timeout_seconds)
        cluster = Cluster(role, section.topology, store, {})
        with _in_groups(cluster, config, secret, interface, local_constructors(settings)):
            yield cluster


@contextmanager
def _in_groups(
    cluster: Cluster, config: RunConfig, secret: Secret, interface: str, constructors: Iterable[partial[Any]]
) -> Iterator[None]:
    """Torch's groups, from when every role has joined to when all leave."""
    run_interruptibly(partial(_start_torch, cluster, config, secret, interface, constructors))
    yield
    _leave(config.cluster.timeout_seconds)
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave(timeout_seconds: float) -> None:
    """Leave the RPC group, when every role does."""
    try:
        run_interruptibly(partial(transport.stop, timeout_seconds))
    except RuntimeError as error:  # torch's, where another role has gone before its time: it says why
        raise StoppedError(f"another role went away: {first_line(error)}") from error


@contextmanager
def _connected(reach: Callable[[], Channel], timeout_seconds: float) -> Iterator[Store]:
    store = Store(reach, timeout_seconds)
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
    if (verdict := store.get(VERDICT).decode()) != _GO:
        word = Word.parse(verdict)
        raise StoppedError(f"stopped by the master: {word.reason}", word.code)


def _appears(store: dist.Store, key: str, timeout: timedelta) -> bool:
    """Whether ``key`` is there within that time."""
    try:
        store.wait([key], timeout)
    except dist.DistStoreError:
        return False
    return True


def _start_torch(
    cluster: Cluster, config: RunConfig, secret: Secret, interface: str, constructors: Iterable[partial[Any]]
) -> None:
    """Form the groups of torch; returns when every role has joined."""
    section = config.cluster
    try_ways(cluster.role, cluster.store, interface, section.timeout_seconds)
    if cluster.role.kind is RoleKind.TRAINER:
        _join_trainers(cluster.store, cluster.role, config)
    transport.start(
        cluster.role,
        cluster.topology,
        cluster.store,
        secret=secret,
        run_id=cluster.store.get("run"),
        interface=interface,
        timeout_seconds=section.timeout_seconds,
        constructors=constructors,
    )


def _join_trainers(store: dist.Store, role: Role, config: RunConfig) -> None:
    """Form the trainers' process group, in which DDP reduces gradients."""
    section = config.cluster
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


def _stop_as_well(number: int) -> None:
    """Have the main thread, the master's, stop since another role was asked to."""
    ours = number if number == WARNING else ASK_SIGNAL
    signal.pthread_kill(threading.main_thread().ident or 0, ours)


def announce_stop(cluster: Cluster, word: Word = _DONE) -> None:
    """Tell every role to stop; called by the master."""
    if not word.reason:
        cluster.store.set(STOP, str(word))
    elif cluster.rendezvous is not None:
        cluster.rendezvous.stop(word, _FAREWELL_SECONDS)


def await_stop(cluster: Cluster) -> ExitCode:
    """Wait for the master's word to stop, answering calls meanwhile; the code to end with in peace.

    Raises:
        ClusterError: the run failed, or the master went away.
    """
    while not _appears(cluster.store, STOP, _LONGEST_WAIT):
        pass
    word = Word.parse(cluster.store.get(STOP).decode())
    if word.reason:
        raise StoppedError(f"stopped by the master: {word.reason}", word.code)
    return word.code


def _gather(store: dist.Store, topology: Topology, timeout_seconds: float) -> dict[Role, Member]:
    """Wait for every role; ClusterError where one is missing."""
    roles = [*topology.trainers, *topology.workers]
    deadline = time.monotonic() + timeout_seconds
    for role in roles:
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        if not _appears(store, f"member/{role}", left):
            raise ClusterError(_who_is_missing(store, roles, timeout_seconds))
    members = {role: Member(*json.loads(store.get(f"member/{role}"))) for role in roles}
    places = {str(role): (each.host, each.network) for role, each in members.items()}
    tell_places(store, {str(MASTER): (socket.gethostname(), own_network())} | places)
    store.set("run", secrets.token_hex(_RUN_ID_BYTES))
    store.set(VERDICT, _GO)
    return members


def _who_is_missing(store: dist.Store, roles: list[Role], timeout_seconds: float) -> str:
    missing = ", ".join(str(role) for role in roles if not store.check([f"member/{role}"]))
    twice = ", ".join(str(role) for role in roles if store.check([f"{TWICE}/{role}"]))
    hint = f"; started twice: {twice}" if twice else ""
    return f"missing after {timeout_seconds:g} s (cluster.start_timeout_seconds): {missing}{hint}"
