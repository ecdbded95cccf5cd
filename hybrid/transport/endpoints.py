"""The functions of this process that other processes can call, and the objects that these functions use."""

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
    """The objects and connections of this process in one cluster."""

    # By qualified name of the class, constructors that have arguments of this process.
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
    """The host name of a process, and the memory that the process can use, as in :func:`free_memory`."""

    host: str
    free_bytes: dict[str, int]  # a result of free_memory


def echo(tensor: Tensor) -> Tensor:
    """Return the tensor. The first call makes torch open its connections between the two processes."""
    return tensor


def process_status() -> ProcessStatus:
    return ProcessStatus(socket.gethostname(), free_memory())


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def lookup(plain: PlainLookup, tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    """Start a lookup in this worker's tables; return a future of its vectors. See ``PlainLookup``."""
    use_configured_threads()
    number, ticket, items = plain
    tables: TableShards = running.objects[number]
    return tables.lookup(Ticket.of(ticket), unpack_items(items, tensors))


def exchange(plain: PlainExchange, tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    """Pass gradients to the tables; return a future of the vectors of the lookup in ``plain``, or of []."""
    number, ticket, num_grads, next_ticket, items = plain
    tables: TableShards = running.objects[number]
    grads = tensors[:num_grads]
    next_lookup = None
    if next_ticket is not None:
        next_lookup = LookupRequest(Ticket.of(next_ticket), unpack_items(items, tensors[num_grads:]))
    return tables.send_gradients(Ticket.of(ticket), grads, next_lookup)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def call_net(number: int, ticket: PlainTicket, hidden_BH: Tensor) -> Future[Tensor]:
    """Call object ``number``, a dense net on this worker; return a future of its output."""
    use_configured_threads()
    net: HostedNet = running.objects[number]
    return net.call(Ticket.of(ticket), hidden_BH)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def squared_norm(number: int, step: int) -> Future[float]:
    hosted: HostedModule = running.objects[number]
    return hosted.squared_norm(step)


def create(number: int, cls: Callable[..., Any], args: tuple[Any, ...]) -> Failure | None:
    """Construct ``cls(*args)`` as object ``number``; return a :class:`Failure` if that raises, else None."""
    use_configured_threads()
    try:
        running.objects[number] = running.constructors.get(qualified_name(cls), cls)(*args)
    except Exception as error:  # returned as a value
        return make_failure(error)
    return None


def created_module(number: int) -> nn.Module:
    """Return object ``number``, a module from :func:`create`; torch's ``RemoteModule`` calls this."""
    module: nn.Module = running.objects[number]
    return module


def invoke(number: int, method: str, args: tuple[Any, ...]) -> Any:
    """Call a method of object ``number``; return its result, or a :class:`Failure` if it raises.

    Args:
        method: name of a public method, or ``barrier.NAME`` for a method of the object's UpdateBarrier. The
            method "close" also removes the object.
    """
    use_configured_threads()
    try:
        if "._" in f".{method}":
            raise ClusterError(f"{method} cannot be called by RPC: it is not public")
        objects = running.objects
        owner = objects.pop(number) if method == "close" else objects[number]
        return attrgetter(method)(owner)(*args)
    except Exception as error:  # returned as a value
        return make_failure(error)


# The functions that each transport can call. RPC has lookups of sync mode, sockets all others.
SOCKET_CALLS = (lookup, exchange)
CALLS = (lookup, echo, process_status, call_net, squared_norm, create, invoke)
