"""Stubs of objects on other processes, and the start and stop of RPC and sockets."""

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, TypeVarTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.futures import Future

from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.bags import Item, pack_items
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.primitives.deferred_response import ObservableResult
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.security.closed_listeners import close_listeners_after
from hybrid.security.message_signature import Signatures
from hybrid.security.rejected_messages import RejectionLog
from hybrid.security.secret import Secret
from hybrid.security.signed_pickler import SignedPickler, addressed_to, install, reject_pickled_classes
from hybrid.server.barrier import HostedModule, UpdateBarrier
from hybrid.topology import Role, RoleKind, Topology, polls_shared_memory
from hybrid.transport.rpc import endpoints
from hybrid.transport.rpc.endpoints import CALLS, SOCKET_CALLS, local_constructors
from hybrid.transport.rpc.pending_calls import Pending, PendingTensors, gather
from hybrid.transport.socket.handshake import Identity, accept_trainers, connect_to_workers
from hybrid.transport.socket.socket_calls import CLIENTS, SocketClient, SocketServer
from hybrid.user_code.user_modules import qualified_name, to_reference

Owned = TypeVar("Owned", covariant=True)
Kind = TypeVar("Kind", bound=HostedModule, covariant=True)
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_scheme_numbers = itertools.count()
# These threads execute calls and receive responses. Few calls block a thread: a trainer's steps, and a worker
# that waits for updates before a checkpoint. The other calls compute, so more threads than cores do not help.
_RPC_THREADS = 8
_servers: list[SocketServer] = []  # on a worker


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


class Remote(Generic[Owned]):
    """A stub of an object on another process."""

    def __init__(self, role: Role, rref: rpc.RRef[Any]) -> None:
        self.role = role
        self._rref = rref

    def call(
        self,
        method: Callable[[Owned, *Arguments], Result],
        *args: *Arguments,
        timeout_seconds: float = rpc.constants.UNSET_RPC_TIMEOUT,
    ) -> Pending[Result]:
        """Start a call of a method of the object.

        Functions among the arguments are sent by name; see :func:`to_reference`.

        Args:
            method: a method of the object's class.
        """
        sent = (self._rref, method.__name__, tuple(map(to_reference, args)))
        return Pending(self.role, _send(self.role, endpoints.invoke, *sent, timeout_seconds=timeout_seconds))

    def local_value(self) -> Owned:
        """Return the object; on the process that owns it only."""
        return cast(Owned, self._rref.local_value())


class ModuleRef(NamedTuple):
    """A module on another process: a reference that keeps the module alive, and its number there.

    The calls of a step contain the number, since a reference makes a small message 1.5 times as expensive.
    """

    rref: rpc.RRef[Any]
    number: int


class RemoteHosted(Remote[Kind]):
    """A stub of a module that a worker hosts and updates once a step."""

    def __init__(self, role: Role, module: ModuleRef) -> None:
        super().__init__(role, module.rref)
        self._number = module.number

    @property
    def module(self) -> ModuleRef:
        """The reference to the module, and its number."""
        return ModuleRef(self._rref, self._number)

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> Pending[Result]:
        """Start a call of a method of the module's update barrier; see :meth:`call`."""
        return Pending(self.role, _send(self.role, endpoints.invoke, self._number, method.__name__, args))

    def squared_norm(self, step: int) -> Pending[float]:
        """See :meth:`UpdateBarrier.squared_norm`."""
        return Pending(self.role, _send(self.role, endpoints.squared_norm, self._number, step))


class RemoteTables(RemoteHosted[TableShards]):
    """A stub of a worker's tables."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> PendingTensors[list[Tensor]]:
        """See :meth:`TableShards.lookup`; distributed autograd records lookups for training."""
        if ticket.purpose is Purpose.PREFETCH:
            return self._exchange(None, (), ticket, items)
        plain, tensors = pack_items(items)
        request = self._number, ticket.plain, plain
        if ticket.purpose is Purpose.TRAIN:
            return PendingTensors(self.role, _send(self.role, endpoints.lookup, request, tensors))
        return PendingTensors(self.role, CLIENTS[self.role].call(endpoints.lookup, request, tensors))

    def send_gradients(
        self,
        ticket: Ticket,
        grads: Sequence[Tensor],
        next_ticket: Ticket | None = None,
        items: Sequence[Item] = (),
    ) -> PendingTensors[list[Tensor]]:
        """See :meth:`TableSource.send_gradients`."""
        return self._exchange(ticket, grads, next_ticket, items)

    def skip(self) -> ObservableResult[list[Tensor]]:
        """See :meth:`TableSource.skip`."""
        nothing: Future[list[Tensor]] = Future()
        nothing.set_result([])
        return nothing

    def _exchange(
        self,
        ticket: Ticket | None,
        grads: Sequence[Tensor],
        next_ticket: Ticket | None,
        items: Sequence[Item],
    ) -> PendingTensors[list[Tensor]]:
        plain, tensors = pack_items(items)
        segment = ticket and ticket.plain, len(grads), next_ticket and next_ticket.plain, plain
        return PendingTensors(self.role, self.send_segments([segment], [*grads, *tensors]))

    def send_segments(
        self, segments: Sequence[endpoints.PlainSegment], tensors: Sequence[Tensor]
    ) -> ObservableResult[Any]:
        """Call :func:`endpoints.exchange`; :func:`raise_call_error` interprets its errors.

        The caller may overwrite ``tensors`` as soon as this returns.
        """
        return CLIENTS[self.role].call(endpoints.exchange, (self._number, segments), tensors)


class RemoteNet(RemoteHosted[HostedNet]):
    """A stub of a dense net on a worker; a call is part of the graph of distributed autograd."""

    def __call__(self, ticket: Ticket, hidden_BH: Tensor) -> Tensor:
        """Return the remote net's output for ``hidden_BH``; see :meth:`HostedNet.call`."""
        sending = _send(self.role, endpoints.call_net, self._number, ticket.plain, hidden_BH)
        return PendingTensors[Tensor](self.role, sending).wait()


def create(
    role: Role, cls: Callable[[*Arguments], Owned], *args: *Arguments, timeout_seconds: float
) -> Pending[Remote[Owned]]:
    """Start constructing ``cls(*args)`` on ``role``; the response is a stub of the object.

    Args:
        cls: a class of this project, or of a user module.
    """
    sent = (qualified_name(cls), tuple(map(to_reference, args)))
    return Pending(
        role, _send(role, endpoints.create, *sent, timeout_seconds=timeout_seconds), partial(Remote, role)
    )


def create_module(role: Role, cls: Callable[[*Arguments], nn.Module], *args: *Arguments) -> ModuleRef:
    """Construct a module on ``role`` as a ``RemoteModule``; return once it is constructed.

    Args:
        cls: see :func:`create`.

    Raises:
        RemoteError: the constructor raised an exception.
        LostError: the role did not respond.
    """
    # RemoteModule does not wait for the constructor, and reports its exception at the first use only.
    sent = (qualified_name(cls), tuple(map(to_reference, args)))
    with addressed_to(role.rpc_name):
        remote = RemoteModule(f"{role.rpc_name}/cpu", endpoints.create_module, sent)  # type: ignore[arg-type]
    rref = remote.get_module_rref()
    number = Pending[int](role, _send(role, endpoints.await_module, rref)).wait()
    return ModuleRef(rref, number)


def open_connection(role: Role) -> Pending[Tensor]:
    """Connect this process and ``role`` for calls and tensors."""
    return Pending(role, _send(role, endpoints.echo, torch.zeros(1)))


def ping(role: Role, timeout_seconds: float) -> Pending[endpoints.ProcessStatus]:
    """Request the status of ``role``."""
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
    """Join the RPC group of a cluster, and connect sockets; return after every role has done so.

    Args:
        store: the cluster's key-value store.
        run_id: random bytes, the same for all roles, and new at each start of the cluster.
        interface: network interface on which this process listens.
        timeout_seconds: timeout of calls that do not set one.
        constructors: classes with further arguments that their objects get on this process.
    """
    os.environ["TP_SOCKET_IFNAME"] = interface
    rank, world_size = topology.rank(role), topology.world_size
    scheme = f"hybrid{next(_scheme_numbers)}"
    names = dist.PrefixStore("rpc", store)
    register_rendezvous_handler(scheme, lambda *_args, **_kwargs: iter([(names, rank, world_size)]))
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_RPC_THREADS,
        rpc_timeout=timeout_seconds,
        init_method=f"{scheme}://",
        _transports=["shm", "uv"] if polls_shared_memory(world_size) else ["uv"],
        _channels=["basic"],  # one connection; other channels open 16, and are no faster
    )
    name = role.rpc_name
    install(SignedPickler(Signatures(secret, run_id, name), CALLS, RejectionLog()))
    local_constructors.update({qualified_name(each.func): each for each in constructors})
    with warnings.catch_warnings(), reject_pickled_classes(), close_listeners_after(names, rank, world_size):
        # init_rpc calls code for which torch warns.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
        # Connect to all partners: no role can connect later, and torch's barriers use these connections.
        gather([open_connection(each) for each in topology.partners(role)])
        rpc.api._all_gather(None, timeout=timeout_seconds)
    identity = Identity(role, topology, secret, run_id, timeout_seconds)
    sockets = dist.PrefixStore("sockets", store)
    if role.kind is RoleKind.TRAINER:
        for worker, connection in connect_to_workers(identity, sockets).items():
            CLIENTS[worker] = SocketClient(connection, timeout_seconds)
    elif role.kind is RoleKind.WORKER:
        _servers.append(SocketServer(accept_trainers(identity, sockets, interface), SOCKET_CALLS))


def stop(timeout_seconds: float) -> None:
    """Leave the RPC group, and close all sockets; wait up to ``timeout_seconds`` until every role leaves."""
    try:
        rpc.shutdown(timeout=timeout_seconds)
    finally:
        install(None)
        local_constructors.clear()
        while CLIENTS:
            CLIENTS.popitem()[1].close()
        while _servers:
            _servers.pop().close(timeout_seconds)
