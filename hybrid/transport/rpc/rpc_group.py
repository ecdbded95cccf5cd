"""Join the RPC group of a cluster, and leave it."""

import itertools
import os
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from hybrid.security.closed_listeners import close_listeners_after
from hybrid.security.message_signature import Signatures
from hybrid.security.rejected_messages import RejectionLog
from hybrid.security.secret import Secret
from hybrid.security.signed_pickler import SignedPickler, install, plain_collectives
from hybrid.topology import Role, RoleKind, Topology, polls_shared_memory
from hybrid.transport.rpc.endpoints import CALLS, SOCKET_CALLS, local_constructors
from hybrid.transport.rpc.stubs import greet
from hybrid.transport.socket.handshake import Identity, accept_trainers, connect_to_workers
from hybrid.transport.socket.socket_client import CLIENTS, SocketClient
from hybrid.transport.socket.socket_server import SocketServer
from hybrid.user_code.function_names import qualified_name

_scheme_numbers = itertools.count()
# They execute calls and receive responses. Few calls wait in one: a trainer's steps, and a worker's wait for
# updates before a checkpoint. The rest is computation, which the cores limit.
_RPC_THREADS = 8
_servers: list[SocketServer] = []  # on a worker


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
    """Join the RPC group of a cluster, and connect sockets; return when every role has.

    Args:
        store: the cluster's key-value store.
        run_id: random, the same for all roles, and new at each start of the cluster.
        interface: network interface on which this process listens.
        timeout_seconds: of every call, unless it names its own.
        constructors: of classes whose objects get further arguments on this process.
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
    with warnings.catch_warnings(), plain_collectives(), close_listeners_after(names, rank, world_size):
        # Torch warns of its own code within init_rpc.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
        # Connect to all partners, so that nobody connects later; torch's barriers use these connections.
        for greeting in [greet(each) for each in topology.partners(role)]:
            greeting.wait()
        rpc.api._all_gather(None, timeout=timeout_seconds)
    identity = Identity(role, topology, secret, run_id, timeout_seconds)
    sockets = dist.PrefixStore("sockets", store)
    if role.kind is RoleKind.TRAINER:
        for worker, connection in connect_to_workers(identity, sockets).items():
            CLIENTS[worker] = SocketClient(connection, timeout_seconds)
    elif role.kind is RoleKind.WORKER:
        _servers.append(SocketServer(accept_trainers(identity, sockets, interface), SOCKET_CALLS))


def stop(timeout_seconds: float) -> None:
    """Leave the RPC group; wait up to ``timeout_seconds`` until every role leaves."""
    try:
        rpc.shutdown(timeout=timeout_seconds)
    finally:
        install(None)
        local_constructors.clear()
        while CLIENTS:
            CLIENTS.popitem()[1].close()
        while _servers:
            _servers.pop().close(timeout_seconds)
