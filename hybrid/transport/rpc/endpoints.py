"""What other processes can call here, and nothing else of what they can name."""

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
from hybrid.embedding.bags import PlainItem, put_together
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import ClusterError
from hybrid.primitives.available_memory import available_memory_bytes
from hybrid.primitives.deferred_response import Answer, serving
from hybrid.protocol.ticket import PlainTicket, Ticket
from hybrid.server.hosted_module import Hosted
from hybrid.transport.rpc.call_failure import Failure, failure_of
from hybrid.user_code.function_names import from_reference, load_user_object
from hybrid.user_code.tracebacks import PROJECT

# What others have created here, by number, as long as they keep it.
_created: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()
# By name, the constructors that add arguments of this process.
local_constructors: dict[str, partial[Any]] = {}

# A lookup without its tensors: number of the tables, ticket, items.
PlainLookup: TypeAlias = tuple[int, PlainTicket, Sequence[PlainItem]]
# What a trainer sends for a step: the ticket of gradients and how many they are, the ticket of a lookup and
# its items; either ticket may be None.
PlainPart: TypeAlias = tuple[PlainTicket | None, int, PlainTicket | None, Sequence[PlainItem]]


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a process says of itself, and of the memory its host has free.

    Attributes:
        available_bytes: of the host.
        resident_bytes: that the process takes.
        threads, open_files: that it has.
        live_contexts: of distributed autograd.
    """

    host: str
    pid: int
    available_bytes: int
    resident_bytes: int
    threads: int
    open_files: int
    live_contexts: int


def greet(tensor: Tensor) -> Tensor:
    """Answer with a tensor, so that both sides have connected for tensors as well."""
    return tensor


def vitals() -> Vitals:
    """What this process says of itself."""
    process = psutil.Process()
    contexts = int(dist_autograd._get_debug_info()["num_autograd_contexts"])
    return Vitals(
        socket.gethostname(),
        process.pid,
        available_memory_bytes(),
        process.memory_info().rss,
        process.num_threads(),
        process.num_fds(),
        contexts,
    )


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def lookup(plain: PlainLookup, tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    """See :meth:`TableShards.lookup`. An exception comes back like one of a later response."""
    number, ticket, items = plain
    tables: TableShards = _created[number]
    try:
        return tables.lookup(Ticket.of(ticket), put_together(items, tensors))
    except Exception as error:  # the caller's to know
        answer: Answer[list[Tensor]] = Answer()
        answer.set_exception(error)
        return answer


def exchange(plain: tuple[int, Sequence[PlainPart]], tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    """What trainers send for their steps, one or several: gradients, then lookups, each of either or none.

    The answer: the tensors of all lookups. All gradients are received before anything is looked up, and an
    update that they complete is made meanwhile.
    """
    number, parts = plain
    tables: TableShards = _created[number]
    rest, lookups = iter(tensors), []
    looks_up = any(next_ticket is not None for _, _, next_ticket, _ in parts)
    for ticket, num_grads, next_ticket, items in parts:
        if ticket is not None:
            tables.receive(Ticket.of(ticket), list(islice(rest, num_grads)), updates_here=looks_up)
        if next_ticket is not None:
            lookups.append((Ticket.of(next_ticket), put_together(items, rest)))
    if len(lookups) == 1:
        return tables.lookup(*lookups[0])
    answer: Answer[list[Tensor]] = Answer()
    with serving(None):
        answers = collect_all([tables.lookup(*each) for each in lookups])
    answers.add_done_callback(partial(_complete, answer))
    return answer


def _complete(answer: Answer[list[Tensor]], answers: Future[list[Future[list[Tensor]]]]) -> None:
    """Answer with the tensors of all, in order, or with the first failure."""
    try:
        answer.set_result([tensor for each in answers.value() for tensor in each.value()])
    except Exception as error:  # handed on to whoever waits
        answer.set_exception(error)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def call_net(number: int, ticket: PlainTicket, hidden_BH: Tensor) -> Future[Tensor]:
    """See :meth:`HostedNet.call`."""
    net: HostedNet = _created[number]
    return net.call(Ticket.of(ticket), hidden_BH)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def norm(number: int, step: int) -> Future[float]:
    """See :meth:`UpdateBarrier.norm`."""
    hosted: Hosted = _created[number]
    return hosted.barrier.norm(step)


def _find_constructor(name: str) -> Callable[..., Any]:
    """Return the class or function, "module:name", of this project or of the user's modules."""
    if name in local_constructors:
        return local_constructors[name]
    module, _, qualified = name.partition(":")
    if module.partition(".")[0] not in PROJECT:
        return load_user_object(name)  # type: ignore[no-any-return]
    found: Callable[..., Any] = getattr(importlib.import_module(module), qualified)
    return found


def create(name: str, args: tuple[Any, ...]) -> rpc.RRef[Any] | Failure:
    """Construct an object of the class ``name`` here, and return a reference to it."""
    try:
        return rpc.RRef(_find_constructor(name)(*map(from_reference, args)))
    except Exception as error:  # comes back as a value
        return failure_of(error)


class _Unbuilt(nn.Module):
    """In the place of a module whose constructor has failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


def create_module(name: str, args: tuple[Any, ...]) -> nn.Module:
    """The module of a ``RemoteModule``, or what :func:`await_module` tells a failure by."""
    try:
        module: nn.Module = _find_constructor(name)(*map(from_reference, args))
        return module
    except Exception as error:  # comes back as a value
        return _Unbuilt(failure_of(error))


def await_module(rref: rpc.RRef[nn.Module]) -> int | Failure:
    """The number of a module that lives here, once it is there."""
    module = rref.local_value()
    if isinstance(module, _Unbuilt):
        return module.failure
    number = next(_numbers)
    _created[number] = module
    return number


def invoke(rref: rpc.RRef[Any], method: str, args: tuple[Any, ...]) -> Any:
    """What a public method of an object that lives here returns."""
    try:
        return _invoke(rref.local_value(), method, args)
    except Exception as error:  # comes back as a value
        return failure_of(error)


def invoke_barrier(number: int, method: str, args: tuple[Any, ...]) -> Any:
    """What a public method of the update barrier of what is hosted here returns."""
    try:
        return _invoke(_created[number].barrier, method, args)
    except Exception as error:  # comes back as a value
        return failure_of(error)


def _invoke(owned: Any, method: str, args: tuple[Any, ...]) -> Any:
    if method.startswith("_"):
        raise ClusterError(f"{method} cannot be called by RPC: it is not public")
    return getattr(owned, method)(*map(from_reference, args))


# Calls outside of distributed autograd, by the socket transport; a lookup within it is a call by RPC.
SOCKET_CALLS = (lookup, exchange)
CALLS = (lookup, greet, vitals, call_net, norm, create, await_module, invoke, invoke_barrier)
