"""The functions that other processes can call here."""

import importlib
import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import psutil
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd, rpc
from torch.futures import Future, collect_all

from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.bags import PackedItem, unpack_items
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import ClusterError
from hybrid.primitives.available_memory import available_memory_bytes
from hybrid.primitives.deferred_response import DeferredResponse, serve_caller
from hybrid.protocol.ticket import PlainTicket, Ticket
from hybrid.server.barrier import HostedModule
from hybrid.transport.rpc.pending_calls import Failure, make_failure
from hybrid.user_code.user_modules import PROJECT, from_reference, load_user_object

# Modules that other processes created here, by number, for as long as those processes refer to them.
_modules: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()
# By class name, constructors with arguments of this process.
local_constructors: dict[str, partial[Any]] = {}

# A lookup without its tensors: number of the module, ticket, items.
PlainLookup: TypeAlias = tuple[int, PlainTicket, Sequence[PackedItem]]
# A trainer's segment of an exchange: ticket and number of gradients, ticket and items of a lookup. Without
# gradients, or without a lookup, its ticket is None.
PlainSegment: TypeAlias = tuple[PlainTicket | None, int, PlainTicket | None, Sequence[PackedItem]]


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Memory, threads and open files of a process.

    Attributes:
        available_bytes: available memory of its host.
        live_contexts: number of contexts of distributed autograd.
    """

    host: str
    pid: int
    available_bytes: int
    resident_bytes: int
    threads: int
    open_files: int
    live_contexts: int


def echo(tensor: Tensor) -> Tensor:
    """Return the tensor; so both processes open their connections, the one for tensors included."""
    return tensor


def process_status() -> ProcessStatus:
    """Return the status of this process."""
    process = psutil.Process()
    return ProcessStatus(
        socket.gethostname(),
        process.pid,
        available_memory_bytes(),
        process.memory_info().rss,
        process.num_threads(),
        process.num_fds(),
        int(dist_autograd._get_debug_info()["num_autograd_contexts"]),
    )


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def lookup(plain: PlainLookup, tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    """See :meth:`TableShards.lookup`."""
    number, ticket, items = plain
    tables: TableShards = _modules[number]
    return tables.lookup(Ticket.of(ticket), unpack_items(items, tensors))


def exchange(plain: tuple[int, Sequence[PlainSegment]], tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    """Receive the segments of one or several trainers: gradients, then lookups.

    All gradients are received before the first lookup. If they complete an update, it is applied in this
    call.

    Returns:
        The tensors of all lookups.
    """
    number, segments = plain
    tables: TableShards = _modules[number]
    rest, lookups = iter(tensors), []
    looks_up = any(next_ticket is not None for _, _, next_ticket, _ in segments)
    for ticket, num_grads, next_ticket, items in segments:
        if ticket is not None:
            tables.receive(Ticket.of(ticket), list(islice(rest, num_grads)), should_update_here=looks_up)
        if next_ticket is not None:
            lookups.append((Ticket.of(next_ticket), unpack_items(items, rest)))
    if len(lookups) == 1:
        return tables.lookup(*lookups[0])
    response: DeferredResponse[list[Tensor]] = DeferredResponse()

    def complete(futures: Future[list[Future[list[Tensor]]]]) -> None:
        try:
            response.set_result([tensor for each in futures.value() for tensor in each.value()])
        except Exception as error:  # reported to the caller
            response.set_exception(error)

    with serve_caller(None):
        futures = collect_all([tables.lookup(*each) for each in lookups])
    futures.add_done_callback(complete)
    return response


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def call_net(number: int, ticket: PlainTicket, hidden_BH: Tensor) -> Future[Tensor]:
    """See :meth:`HostedNet.call`."""
    net: HostedNet = _modules[number]
    return net.call(Ticket.of(ticket), hidden_BH)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def squared_norm(number: int, step: int) -> Future[float]:
    """See :meth:`UpdateBarrier.squared_norm`."""
    hosted: HostedModule = _modules[number]
    return hosted.barrier.squared_norm(step)


def _find_constructor(name: str) -> Callable[..., Any]:
    """Return the class or function "module:name" of this project or of a user module."""
    if name in local_constructors:
        return local_constructors[name]
    module, _, qualified = name.partition(":")
    if module.partition(".")[0] not in PROJECT:
        return load_user_object(name)  # type: ignore[no-any-return]
    return getattr(importlib.import_module(module), qualified)  # type: ignore[no-any-return]


def create(name: str, args: tuple[Any, ...]) -> rpc.RRef[Any] | Failure:
    """Construct an object of the class ``name``, and return a reference to it."""
    try:
        return rpc.RRef(_find_constructor(name)(*map(from_reference, args)))
    except Exception as error:  # returned as a value
        return make_failure(error)


class FailedModule(nn.Module):
    """A placeholder for a module whose constructor failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


def create_module(name: str, args: tuple[Any, ...]) -> nn.Module:
    """Construct the module of a ``RemoteModule``; :func:`await_module` reports a failure."""
    try:
        return _find_constructor(name)(*map(from_reference, args))  # type: ignore[no-any-return]
    except Exception as error:  # returned as a value
        return FailedModule(make_failure(error))


def await_module(rref: rpc.RRef[nn.Module]) -> int | Failure:
    """Return the number of a module of this process, once it is constructed."""
    module = rref.local_value()
    if isinstance(module, FailedModule):
        return module.failure
    number = next(_numbers)
    _modules[number] = module
    return number


def invoke(target: rpc.RRef[Any] | int, method: str, args: tuple[Any, ...]) -> Any:
    """Call a public method of an object of this process.

    Args:
        target: the object, or the number of a module, whose update barrier is the object.
    """
    try:
        if method.startswith("_"):
            raise ClusterError(f"{method} cannot be called by RPC: it is not public")
        owned = _modules[target].barrier if isinstance(target, int) else target.local_value()
        return getattr(owned, method)(*map(from_reference, args))
    except Exception as error:  # returned as a value
        return make_failure(error)


# Functions that the socket transport calls. A lookup within distributed autograd is a call by RPC.
SOCKET_CALLS = (lookup, exchange)
CALLS = (lookup, echo, process_status, call_net, squared_norm, create, await_module, invoke)
