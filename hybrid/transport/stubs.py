"""Stubs of objects on other processes, and the start and stop of RPC and sockets."""

import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar, TypeVarTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.futures import Future

from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.bags import Item, pack_items
from hybrid.embedding.table_source import LookupRequest, TableSource
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import ClusterError
from hybrid.security.closed_listeners import close_listeners_after
from hybrid.security.message_signature import Signatures
from hybrid.security.rejections import RejectionLog
from hybrid.security.secret import Secret
from hybrid.security.signed_pickler import SignedPickler, addressed_to, install, reject_pickled_classes
from hybrid.topology import Role, RoleKind, Topology, polls_shared_memory
from hybrid.transport import endpoints
from hybrid.transport.endpoints import CALLS, SOCKET_CALLS, ClusterState
from hybrid.transport.pending_calls import Pending, PendingTensors, gather
from hybrid.transport.socket.handshake import Identity, accept_trainers, connect_to_workers
from hybrid.transport.socket.socket_calls import SocketClient, SocketServer
from hybrid.updates.barrier import UpdateBarrier
from hybrid.updates.hosted_module import HostedModule
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.user_code.user_modules import qualified_name

Owned = TypeVar("Owned", covariant=True)
Kind = TypeVar("Kind", bound=HostedModule, covariant=True)
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

# These threads execute calls and receive responses. Few calls block a thread: a trainer's steps, and a worker
# that waits for updates before a checkpoint. The other calls compute, so more threads than cores do not help.
_RPC_THREADS = 8
_NUMBER_BITS = 62
# A worker that waits for a trainer fails first, after one timeout, and its error names the trainer.
_TIMEOUTS_OF_STEPS = 2


def _send(
    role: Role,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = rpc.constants.UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    with addressed_to(role.rpc_name):
        return rpc.rpc_async(  # type: ignore[no-any-return]
            role.rpc_name, function, args=args, timeout=timeout_seconds
        )


def _send_of_step(role: Role, function: Callable[..., Any], *args: Any) -> torch.futures.Future[Any]:
    return _send(role, function, *args, timeout_seconds=_TIMEOUTS_OF_STEPS * rpc.get_rpc_timeout())


class Remote(Generic[Owned]):
    """A stub of an object in the process ``role``. Calling the object's ``close`` also removes the object."""

    def __init__(self, role: Role, number: int) -> None:
        self.role = role
        self.number = number

    def call(
        self,
        method: Callable[[Owned, *Arguments], Result],
        *args: *Arguments,
        timeout_seconds: float = rpc.constants.UNSET_RPC_TIMEOUT,
    ) -> Pending[Result]:
        """Start a call of a public method of the object; :func:`start` sets the default timeout."""
        sent = (self.number, method.__name__, args)
        return Pending(self.role, _send(self.role, endpoints.invoke, *sent, timeout_seconds=timeout_seconds))


class RemoteHosted(Remote[Kind]):
    """A stub of tables or of a dense net, which a worker hosts and updates once a step."""

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> Pending[Result]:
        """Start a call of a method of the tables' or the net's :class:`UpdateBarrier`."""
        name = f"barrier.{method.__name__}"
        return Pending(self.role, _send(self.role, endpoints.invoke, self.number, name, args))

    def squared_norm(self, step: int) -> Pending[float]:
        return Pending(self.role, _send_of_step(self.role, endpoints.squared_norm, self.number, step))


class RemoteTables(RemoteHosted[TableShards], TableSource):
    """A stub of a worker's tables."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> PendingTensors[list[Tensor]]:
        """Start a lookup: by RPC for ``Purpose.TRAIN``, so that autograd records it; otherwise by socket."""
        plain, tensors = pack_items(items)
        request = self.number, ticket.plain, plain
        if ticket.purpose is Purpose.TRAIN:
            return PendingTensors(self.role, _send_of_step(self.role, endpoints.lookup, request, tensors))
        client = endpoints.running.clients[self.role]
        return PendingTensors(self.role, client.call(endpoints.lookup, request, tensors))

    def send_gradients(
        self, ticket: Ticket, grads: Sequence[Tensor], next_lookup: LookupRequest | None = None
    ) -> PendingTensors[list[Tensor]]:
        next_ticket = None if next_lookup is None else next_lookup.ticket.plain
        plain, tensors = pack_items(() if next_lookup is None else next_lookup.items)
        request = self.number, ticket.plain, len(grads), next_ticket, plain
        client = endpoints.running.clients[self.role]
        return PendingTensors(self.role, client.call(endpoints.exchange, request, [*grads, *tensors]))


class RemoteNet(RemoteHosted[HostedNet]):
    """A stub of a dense net on a worker."""

    def __call__(self, ticket: Ticket, hidden_BH: Tensor) -> Tensor:
        """Call the net; return the output, which autograd records. Errors are as in PendingTensors.wait."""
        sending = _send_of_step(self.role, endpoints.call_net, self.number, ticket.plain, hidden_BH)
        return PendingTensors[Tensor](self.role, sending).wait()


def create(
    role: Role, cls: Callable[[*Arguments], Owned], *args: *Arguments, timeout_seconds: float
) -> Pending[Remote[Owned]]:
    """Start to construct ``cls(*args)`` on ``role``; the result of the call is a stub of the object."""
    number = secrets.randbits(_NUMBER_BITS)
    sending = _send(role, endpoints.create, number, cls, args, timeout_seconds=timeout_seconds)
    return Pending(role, sending, lambda _: Remote(role, number))


def create_module(role: Role, cls: Callable[[*Arguments], nn.Module], *args: *Arguments) -> int:
    """Construct the module ``cls(*args)`` on ``role`` as a ``RemoteModule``; return its object number.

    Raises the errors of :meth:`Pending.wait`.
    """
    # RemoteModule would report an exception of the constructor at the first use only.
    number = create(role, cls, *args, timeout_seconds=rpc.constants.UNSET_RPC_TIMEOUT).wait().number
    with addressed_to(role.rpc_name):
        remote = RemoteModule(f"{role.rpc_name}/cpu", endpoints.created_module, (number,))  # type: ignore[arg-type]
    Pending(role, cast(Future[Any], remote.module_rref._get_future())).wait()
    del remote.module_rref  # the role keeps the module, and torch keeps ``remote`` until a garbage collection
    return number


def open_connection(role: Role) -> Pending[Tensor]:
    """Start a call that makes torch open its connections between this process and ``role``."""
    return Pending(role, _send(role, endpoints.echo, torch.zeros(1)))


def ping(role: Role, timeout_seconds: float) -> Pending[endpoints.ProcessStatus]:
    """Start a call that returns the host name and the free memory of a role."""
    return Pending(role, _send(role, endpoints.process_status, timeout_seconds=timeout_seconds))


def start(
    role: Role,
    topology: Topology,
    store: dist.Store,
    *,
    secret: Secret,
    run_id: bytes,
    interface: str,
    timeout_seconds: float,
    constructors: Iterable[partial[Any]] = (),
) -> None:
    """Join the RPC group of a cluster, and connect the sockets of this role.

    If this process is still in an earlier cluster, which failed, it leaves that cluster first.

    Args:
        store: the cluster's key-value store.
        run_id: random bytes, the same for all roles, and new at each start of the cluster.
        interface: network interface on which this process listens.
        timeout_seconds: default timeout of calls, and of waits for other roles. For calls of a step, the
            timeout is twice as long.
        constructors: ``partial(cls, ...)`` with arguments that only this process has. If another process
            calls :func:`create` for ``cls`` on this process, these arguments are added.

    Raises:
        ClusterError: a role does not connect, the interface has no address, or this process had another rank
            in an earlier cluster.
        RuntimeError: torch cannot connect the group, or a worker publishes no address in time.
    """
    with suppress(Exception):  # of the earlier cluster
        _leave(timeout_seconds)
    os.environ["TP_SOCKET_IFNAME"] = interface
    rank = topology.rank(role)
    world_size = topology.world_size
    try:
        dist_autograd._init(rank)
    except RuntimeError as error:
        raise ClusterError(f"{role} must be a new process: this one has had another rank") from error
    names = dist.PrefixStore("rpc", store)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_RPC_THREADS,
        rpc_timeout=timeout_seconds,
        _transports=["shm", "uv"] if polls_shared_memory(world_size) else ["uv"],
        _channels=["basic"],  # one connection; other channels open 16, and are no faster
    )
    install(SignedPickler(Signatures(secret, run_id, role.rpc_name), CALLS, RejectionLog()))
    state = endpoints.running = ClusterState({qualified_name(each.func): each for each in constructors})
    with warnings.catch_warnings(), reject_pickled_classes(), close_listeners_after(names, rank, world_size):
        # This calls code for which torch warns.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        # As init_rpc, which counts the starts of a process. All roles must have the same counts.
        rpc.api._all_gather_sequence_id.clear()
        backend = rpc.BackendType["TENSORPIPE"]
        rpc._init_rpc_backend(backend, names, role.rpc_name, rank, world_size, options)
        # Connect to all partners: no role can connect later, and torch's barriers use these connections.
        gather([open_connection(each) for each in topology.partners(role)])
        rpc.api._all_gather(None, timeout=timeout_seconds)
    identity = Identity(role, topology, secret, run_id, timeout_seconds)
    sockets = dist.PrefixStore("sockets", store)
    if role.kind is RoleKind.TRAINER:
        for worker, connection in connect_to_workers(identity, sockets).items():
            state.clients[worker] = SocketClient(connection, _TIMEOUTS_OF_STEPS * timeout_seconds)
    elif role.kind is RoleKind.WORKER:
        trainers = accept_trainers(identity, sockets, interface)
        state.servers = [SocketServer(each, SOCKET_CALLS) for each in trainers]


def stop(timeout_seconds: float) -> None:
    """Wait until all roles call this function, then leave the cluster.

    After the timeout, leave anyway, and raise RuntimeError. If a socket server has failed, raise its error.
    """
    try:
        rpc.api._all_gather(None, timeout=timeout_seconds)
        # Unlike rpc.shutdown, do not wait until references are deleted, which torch does in one cluster only.
        rpc.api._get_current_rpc_agent().join(shutdown=True, timeout=timeout_seconds)
    finally:
        _leave(timeout_seconds)


def _leave(timeout_seconds: float) -> None:
    state = endpoints.running
    endpoints.running = ClusterState()
    try:
        if rpc.api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
    finally:
        install(None)
        for client in state.clients.values():
            client.close()
        for server in state.servers:
            server.close(timeout_seconds)
