"""Form a cluster, and leave it.

::

    master                                   trainer i, worker j
    ──────                                   ───────────────────
    listens on the rendezvous port           connects, registers: host, pid, mounts
    rejects a duplicate role or other
      versions; else: configuration      ──► reads it, chooses its interface
    waits for every role; after the
      timeout, reports missing roles
    writes "go"                          ──► waits for it
                     all: connect once to each role of another host, join the RPC group

Every connection begins with a handshake (:mod:`workers.rendezvous.secure_channel`). The registration of a
role is its first heartbeat (:mod:`workers.rendezvous.heartbeat`).
"""

import json
import re
import secrets
import signal
import socket
import threading
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
from hybrid.config.loading import apply_settings, read_toml_text
from hybrid.dense.devices import choose_backend, choose_devices, device_id
from hybrid.errors import ClusterError, first_line
from hybrid.security.closed_listeners import close_listeners_after
from hybrid.security.secret import Secret
from hybrid.shared_memory.tensor_blocks import network_id
from hybrid.topology import MASTER, Role, RoleKind, Topology
from hybrid.transport.socket.handshake import address_of
from workers.controller.remote_trainer import Trainer
from workers.controller.script_job import Script
from workers.controller.shared_folders import filesystem_id
from workers.exit_codes import STOP_REQUEST, WARNING, ExitCode, StopMessage, exit_code, forwarding_signals
from workers.rendezvous.heartbeat import HeartbeatInterval, HeartbeatSender, Registration, register
from workers.rendezvous.host_setup import MasterAddress, allow_open_files, choose_interface
from workers.rendezvous.interrupt import Interrupter, StoppedError, describe_final_error, run_interruptibly
from workers.rendezvous.rendezvous_server import GO, LATE, STOP, STORE, RendezvousServer
from workers.rendezvous.secure_channel import Channel, connect

# How long the master of a failed run waits for roles to receive the reason and leave.
_LEAVE_SECONDS = 5.0
_LONGEST_WAIT = timedelta(minutes=1)
_RUN_ID_BYTES = 16
_HOSTS = "hosts"
_BACKLOG = 1024
_LONGEST_ATTEMPT_SECONDS = 10.0  # enough for four connection attempts (SYN packets) of the kernel
# The number of an RPC barrier, in the barrier's key. A process counts barriers over all its clusters.
_BARRIER = re.compile(rb"(?<=_ID_)\d+$")
_DONE = StopMessage()
# The heartbeat interval that a role uses until it has the configuration.
_FIRST_INTERVAL = HeartbeatInterval(RunConfig().cluster.heartbeat_timeout_seconds)


@dataclass(frozen=True, slots=True)
class JoinedCluster:
    """A running cluster, and the role of this process in it."""

    role: Role
    topology: Topology
    store: dist.Store
    members: dict[Role, Registration]  # every other role; on the master only
    rendezvous: RendezvousServer | None = None  # the server; on the master only


class RendezvousStore(dist.Store):
    """A client of the key-value store on the master. It replaces ``TCPStore``, which has no authentication.

    Any thread can use the store, from Python and C++. An interrupt ends a wait. Torch keeps only the C++ part
    of this object, so the caller must keep the object as long as torch may use it.

    Every request raises DistNetworkError if the master has ended, and ClusterError if the master is frozen or
    accepts no connection. ``get`` and ``wait`` raise DistStoreError if a key is not set in time.

    Args:
        connect: opens a connection to the master.
        timeout_seconds: default timeout of ``get`` and ``wait``.
    """

    def __init__(self, connect: Callable[[], Channel], timeout_seconds: float) -> None:
        super().__init__()
        self._connect = connect
        self._timeout = timedelta(seconds=timeout_seconds)
        self._lock = threading.Lock()  # of the attributes below
        self._idle: list[Channel] = []  # free connections: a waiting request blocks no other
        # The number of each barrier in this cluster, by torch's number.
        self._barriers: dict[bytes, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait until ``key`` exists, and return its value."""
        return self._await("get", [key], self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await("wait", keys, self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._request("check", *keys) == b"1"

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number stored under ``key``, 0 if missing; return the sum."""
        return int(self._request("add", key, str(amount)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store ``desired`` if the value of ``key`` is ``expected``; return the value after that.

        The value of a missing key is "". If the key is still missing, return ``expected``, as torch does.
        """
        return self._request("compare_set", key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._request("delete_key", key) == b"1"

    deleteKey = delete_key  # the name that C++ calls

    def clone(self) -> "RendezvousStore":
        """Return this object: a copy is not needed, because requests of threads do not block each other."""
        return self

    def _await(self, operation: str, keys: Sequence[str], timeout: timedelta) -> bytes:
        seconds = timeout.total_seconds()
        return self._request(operation, str(seconds), *keys, seconds=seconds)

    def _request(self, *request: str | bytes, seconds: float = 0.0) -> bytes:
        fields = [field.encode() if isinstance(field, str) else field for field in request]
        known = self._barriers
        with self._lock:
            fields = [_BARRIER.sub(lambda n: known.setdefault(n[0], b"%d" % len(known)), f) for f in fields]
            channel = self._idle.pop() if self._idle else None
        try:
            if channel is None:
                channel = self._connect()
                channel.send(STORE)
            try:
                channel.send(*fields)
                kind, *response = channel.receive(seconds)
            except BaseException:
                channel.close()  # else a late response would be read as the response to the next request
                raise
        except OSError as error:
            raise dist.DistNetworkError(str(error)) from error
        with self._lock:
            self._idle.append(channel)
        if kind == LATE:
            raise dist.DistStoreError(f"{request[0]!r} of {request[2:]!r} timed out after {seconds:g} s")
        return response[0]

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()


@contextmanager
def lead(
    config: RunConfig,
    secret: Secret,
    listener: socket.socket,
    code_of: Callable[[BaseException], ExitCode] = exit_code,
) -> Iterator[JoinedCluster]:
    """As the master, form a cluster and yield it; leave it when the ``with`` block ends, or after an error.

    Args:
        listener: the socket on which the master listens; closed at the end.
        code_of: a function that returns the exit code of all roles for the error that ends the cluster.

    Raises:
        ClusterError: a role is missing, was lost, has failed, or cannot be reached.
        HybridError: a role has other software versions, or this host lacks the configured interface.
    """
    section = config.cluster
    address, port, *_ = listener.getsockname()
    interface = choose_interface(section.interface, address)
    torch.set_num_threads(section.threads)
    interrupter = Interrupter(f"hybrid {MASTER}", section.stop_timeout_seconds, code_of)
    interval = HeartbeatInterval(section.heartbeat_timeout_seconds)
    server = RendezvousServer(listener, secret, config, interrupter.interrupt, _signal_main_thread)
    with interrupter.enabled(), server as rendezvous:
        own_address, seconds = MasterAddress(address, port), section.start_timeout_seconds
        with _open_store(partial(connect, own_address, secret, interval, seconds), seconds) as store:
            try:
                members = rendezvous.await_members(seconds)
                hosts = {str(role): (each.host, each.network) for role, each in members.items()}
                store.set(_HOSTS, json.dumps({str(MASTER): (socket.gethostname(), network_id())} | hosts))
                store.set("run", secrets.token_hex(_RUN_ID_BYTES))
                store.set(GO, "")
                cluster = JoinedCluster(MASTER, section.topology, store, members, rendezvous)
                with _torch_groups(cluster, config, secret, interface, ()):
                    yield cluster
            except BaseException as error:
                rendezvous.stop(StopMessage(code_of(error), describe_final_error(error)), _LEAVE_SECONDS)
                raise
            # Roles need the store until the last role has left the RPC group.
            rendezvous.await_departures(section.timeout_seconds)


@contextmanager
def join(
    role: Role, address: MasterAddress, secret: Secret, settings: Sequence[str] = ()
) -> Iterator[JoinedCluster]:
    """As a trainer or a worker, join a cluster and yield it; leave it when the ``with`` block ends.

    After an error, the caller must end the process by :func:`end_now`, or join another cluster in the same
    role. A normal exit would wait for threads of torch, which may wait for a lost role.

    Args:
        address: address of the master, which sends the configuration.
        settings: ``section.key=value`` texts for this role, which override the master's configuration.

    Raises:
        ClusterError: there is no master, it is frozen, the role is already taken, or another role was lost or
            cannot be reached.
        ConfigError: a setting is invalid or only for the master, this host does not have the configured
            interface, or the master has another secret.
        HybridError: the cluster has no such role, the master has other software versions, or the limit of
            open files is too low.
        StoppedError: the run or the master has ended; the attribute ``code`` is the exit code for this role.
    """
    own = apply_settings(RunConfig(), settings).cluster
    channel = connect(address, secret, _FIRST_INTERVAL, own.start_timeout_seconds)
    try:
        registration = Registration(str(role), filesystem_id(), network_id())
        config = read_toml_text(register(channel, registration))
        channel.interval = interval = HeartbeatInterval(config.cluster.heartbeat_timeout_seconds)
    except BaseException:
        channel.close()
        raise
    interrupter = Interrupter(f"hybrid {role}", config.cluster.stop_timeout_seconds)
    with ExitStack() as stack:
        stack.enter_context(interrupter.enabled())
        heartbeat = stack.enter_context(HeartbeatSender(channel, interrupter.interrupt))
        stack.enter_context(forwarding_signals(heartbeat.forward_signal))
        config = apply_settings(config, settings)
        section = config.cluster
        allow_open_files(section)
        interface = choose_interface(section.interface, channel.local_address)
        torch.set_num_threads(section.threads)
        seconds = section.start_timeout_seconds
        store = stack.enter_context(
            _open_store(partial(connect, address, secret, interval, seconds), seconds)
        )
        # The master reports missing roles after its timeout, which may start up to one timeout later.
        if not _is_set_within(store, GO, timedelta(seconds=2 * seconds)):
            raise ClusterError(f"no message from the master for {2 * seconds:g} s")
        cluster = JoinedCluster(role, section.topology, store, {})
        constructors = [partial(each, settings=settings) for each in (Script, Trainer)]
        with _torch_groups(cluster, config, secret, interface, constructors):
            yield cluster


@contextmanager
def _torch_groups(
    cluster: JoinedCluster,
    config: RunConfig,
    secret: Secret,
    interface: str,
    constructors: Iterable[partial[Any]],
) -> Iterator[None]:
    """Join torch's RPC group, and as a trainer DDP's process group; leave both unless an error occurs."""
    section, role, store = config.cluster, cluster.role, cluster.store

    def start() -> None:
        check_connections(role, store, interface, section.timeout_seconds)
        if dist.is_initialized():  # in a cluster that failed
            dist.destroy_process_group()
        if role.kind is RoleKind.TRAINER:  # join the process group in which DDP reduces gradients
            device = choose_devices(config.dense, role.index)[0]
            store.set(f"device/{role.index}", device_id(device))
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

    run_interruptibly(start)
    yield
    try:
        run_interruptibly(partial(transport.stop, section.timeout_seconds))
    except RuntimeError as error:  # from torch, if another role left early, which reports the reason
        raise StoppedError(f"another role went away: {first_line(error)}") from error
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _open_store(connect: Callable[[], Channel], timeout_seconds: float) -> Iterator[RendezvousStore]:
    store = RendezvousStore(connect, timeout_seconds)
    try:
        yield store
    except dist.DistNetworkError as error:  # of any request to the store, also by torch
        raise StoppedError(f"the master went away: {first_line(error)}") from error
    finally:
        store.close()


def _is_set_within(store: dist.Store, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], timeout)
    except dist.DistStoreError:
        return False
    return True


def check_connections(role: Role, store: dist.Store, interface: str, timeout_seconds: float) -> None:
    """Check that this role can connect to roles on other hosts; wait until all roles have done the same.

    Process groups and RPC connect every pair of roles, on ports that the kernel chooses. If a firewall blocks
    these ports, torch waits long and does not name the roles. On a single host, nothing is checked.

    Args:
        interface: network interface on which other roles reach this role.
        timeout_seconds: time limit of each connection; more than ten seconds count as ten.

    Raises:
        ClusterError: this role cannot connect to another role.
        DistStoreError: another role has not finished its checks in time.
    """
    hosts = json.loads(store.get(_HOSTS))
    if len({network for _, network in hosts.values()}) == 1:
        return
    family, address = address_of(interface)
    with socket.create_server((address, 0), family=family, backlog=_BACKLOG) as listener:
        store.set(f"address/{role}", json.dumps(listener.getsockname()[:2]))
        host, network = hosts[str(role)]
        for other, (other_host, other_network) in hosts.items():
            if other_network == network:
                continue
            other_address = tuple(json.loads(store.get(f"address/{other}")))
            seconds = min(timeout_seconds, _LONGEST_ATTEMPT_SECONDS)
            try:
                socket.create_connection(other_address, seconds, source_address=(address, 0)).close()
            except OSError as error:
                ip, port = other_address
                raise ClusterError(
                    f"{role} on host {host} (interface {interface}) cannot reach {other} on host "
                    f"{other_host} at {ip}:{port} ({error.strerror or first_line(error)}); check "
                    "cluster.interface, and whether a firewall is between them: roles connect to each other "
                    "on any port"
                ) from error
        store.set(f"connected/{role}", "")
        store.wait([f"connected/{each}" for each in hosts])


def _signal_main_thread(number: int) -> None:
    """Signal a stop to the master's main thread, because another role has received signal ``number``."""
    own = number if number == WARNING else STOP_REQUEST
    signal.pthread_kill(threading.main_thread().ident or 0, own)


def announce_stop(cluster: JoinedCluster, message: StopMessage = _DONE) -> None:
    """As the master, stop all other roles. If ``message`` has a reason, wait up to 5 s until all leave."""
    if not message.reason:
        cluster.store.set(STOP, f"{message.code:d}")
    elif cluster.rendezvous is not None:
        cluster.rendezvous.stop(message, _LEAVE_SECONDS)


def serve(role: Role, address: MasterAddress, secret: Secret, settings: Sequence[str] = ()) -> ExitCode:
    """:func:`join` a cluster, serve calls until the master stops this role, and return the exit code."""
    with join(role, address, secret, settings) as cluster:
        return await_stop(cluster)


def await_stop(cluster: JoinedCluster) -> ExitCode:
    """Serve calls until the master stops this role; return the exit code. ClusterError if the run fails."""
    while not _is_set_within(cluster.store, STOP, _LONGEST_WAIT):
        pass
    return ExitCode(int(cluster.store.get(STOP)))
