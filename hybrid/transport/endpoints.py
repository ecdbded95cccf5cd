"""The functions that other processes can call here."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.bags import PackedItem, unpack_items
from hybrid.embedding.table_source import LookupRequest
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import ClusterError
from hybrid.primitives.available_memory import free_memory
from hybrid.primitives.thread_counts import use_configured_threads
from hybrid.topology import Role
from hybrid.transport.pending_calls import Failure, make_failure
from hybrid.transport.socket.socket_calls import SocketClient, SocketServer
from hybrid.updates.hosted_module import HostedModule
from hybrid.updates.ticket import PlainTicket, Ticket
from hybrid.user_code.user_modules import qualified_name


@dataclass(slots=True)
class ClusterState:
    """The state of the transport in a process, for one cluster."""

    # By class name, constructors with arguments of this process.
    constructors: Mapping[str, partial[Any]] = field(default_factory=dict)
    # The objects that other processes created here, by number.
    objects: dict[int, Any] = field(default_factory=dict)
    # On a trainer, the connections to the workers.
    clients: dict[Role, SocketClient] = field(default_factory=dict)
    servers: Sequence[SocketServer] = ()  # on a worker, a server for the calls of each trainer


# Torch has one RPC agent per process, which calls functions of modules. So there is one state at a time.
running = ClusterState()

# A lookup without its tensors: number of the module, ticket, items.
PlainLookup: TypeAlias = tuple[int, PlainTicket, Sequence[PackedItem]]
# Gradients and a lookup without their tensors: number of the module; ticket and number of the gradients;
# ticket and items of the lookup. The second ticket is None without a lookup.
PlainExchange: TypeAlias = tuple[int, PlainTicket, int, PlainTicket | None, Sequence[PackedItem]]


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The free memory of a process."""

    host: str
    free_bytes: dict[str, int]  # see free_memory


def echo(tensor: Tensor) -> Tensor:
    """Return the tensor; the call opens the connections of both processes, also those for tensors."""
    return tensor


def process_status() -> ProcessStatus:
    return ProcessStatus(socket.gethostname(), free_memory())


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def lookup(plain: PlainLookup, tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    use_configured_threads()
    number, ticket, items = plain
    tables: TableShards = running.objects[number]
    return tables.lookup(Ticket.of(ticket), unpack_items(items, tensors))


def exchange(plain: PlainExchange, tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    """See :meth:`TableSource.send_gradients`."""
    number, ticket, num_grads, next_ticket, items = plain
    tables: TableShards = running.objects[number]
    grads = tensors[:num_grads]
    following = None
    if next_ticket is not None:
        following = LookupRequest(Ticket.of(next_ticket), unpack_items(items, tensors[num_grads:]))
    return tables.send_gradients(Ticket.of(ticket), grads, following)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def call_net(number: int, ticket: PlainTicket, hidden_BH: Tensor) -> Future[Tensor]:
    use_configured_threads()
    net: HostedNet = running.objects[number]
    return net.call(Ticket.of(ticket), hidden_BH)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def squared_norm(number: int, step: int) -> Future[float]:
    hosted: HostedModule = running.objects[number]
    return hosted.squared_norm(step)


def create(number: int, cls: Callable[..., Any], args: tuple[Any, ...]) -> Failure | None:
    """Construct an object, and keep it until it is closed; return the failure of the constructor, if any."""
    use_configured_threads()
    try:
        running.objects[number] = running.constructors.get(qualified_name(cls), cls)(*args)
    except Exception as error:  # returned as a value
        return make_failure(error)
    return None


def created_module(number: int) -> nn.Module:
    """Return the module of a ``RemoteModule``; see :func:`create`."""
    module: nn.Module = running.objects[number]
    return module


def invoke(number: int, method: str, args: tuple[Any, ...]) -> Any:
    """Call a public method of an object of this process; ``close`` also releases the object.

    Args:
        method: name of the method, or ``barrier.NAME`` for a method of the module's update barrier.
    """
    use_configured_threads()
    try:
        if "._" in f".{method}":
            raise ClusterError(f"{method} cannot be called by RPC: it is not public")
        result = attrgetter(method)(running.objects[number])(*args)
        if method == "close":
            del running.objects[number]
        return result
    except Exception as error:  # returned as a value
        return make_failure(error)


# Functions that the socket transport calls. A lookup within distributed autograd is a call by RPC.
SOCKET_CALLS = (lookup, exchange)
CALLS = (lookup, echo, process_status, call_net, squared_norm, create, invoke)
