"""Everything that crosses process borders by RPC: the functions called, and their client stubs.

No other file touches ``torch.distributed.rpc``. A call runs a method of an object on the process that
owns it; what it returns or raises comes back as a value (:class:`Failure`), because RPC keeps the type
of three kinds of exception only. Lookups are the exception: they take part in distributed autograd, so
their answer must be bare tensors.

Calls and answers are signed, and only the functions of ``_CALLS`` can be called (``hybrid/trust``).
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.rendezvous import register_rendezvous_handler

from hybrid import errors
from hybrid.answer import Answer
from hybrid.dense.remote import NetHost
from hybrid.embedding.routes import Item
from hybrid.embedding.shard import TableShards
from hybrid.errors import ClusterError, HybridError, first_line
from hybrid.host import Host
from hybrid.memory import available_memory_bytes
from hybrid.own_code import described, name_of, resolved
from hybrid.secret import Secret
from hybrid.topology import Role, Topology
from hybrid.trust.allowed import hosted
from hybrid.trust.pickler import (
    RAISED_LATER,
    REFUSED,
    SignedPickler,
    addressed_to,
    install,
    plain_collectives,
)
from hybrid.trust.refusals import Refusals
from hybrid.trust.signature import Signatures
from hybrid.trust.sockets import sealed_after
from hybrid.update import Ticket

Owned = TypeVar("Owned")
Hosted = TypeVar("Hosted", bound=Host)

_scheme_numbers = itertools.count()
# What others have constructed here, as long as they keep it.
_modules: WeakValueDictionary[int, Any] = WeakValueDictionary()
_module_numbers = itertools.count()
_MIN_RPC_THREADS = 16
_DONE_SECONDS = 1.0


def start(
    role: Role,
    topology: Topology,
    store: dist.Store,
    *,
    secret: Secret,
    run_id: bytes,
    interface: str,
    transport: str,
    timeout_seconds: float,
) -> None:
    """Join the RPC group of a cluster; returns when every role has joined.

    Args:
        store: the cluster's key-value store, connected.
        secret: the cluster's; who does not have it can call nothing.
        run_id: the same for all roles, and drawn anew at each start of the cluster.
        interface: network interface that this process listens on.
        transport: "uv" (TCP), "shm" (shared memory where it can), or "auto".
        timeout_seconds: of every call, unless it names its own.
    """
    os.environ["TP_SOCKET_IFNAME"] = interface
    rank, world_size = topology.rank(role), topology.world_size
    scheme = f"hybrid{next(_scheme_numbers)}"
    register_rendezvous_handler(
        scheme, lambda *_args, **_kwargs: iter([(dist.PrefixStore("rpc", store), rank, world_size)])
    )
    if transport == "auto":
        # shm polls: with fewer cores than processes it takes the core that the answer is computed on.
        transport = "uv" if world_size > (os.cpu_count() or 1) else "shm"
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=max(_MIN_RPC_THREADS, world_size + 4),
        rpc_timeout=timeout_seconds,
        init_method=f"{scheme}://",
        _transports=["uv"] if transport == "uv" else ["shm", "uv"],
    )
    name = str(role.rpc_name)  # not an enum: torch pickles it
    install(SignedPickler(Signatures(secret, run_id, name), _CALLS, Refusals()))
    with warnings.catch_warnings(), plain_collectives(), sealed_after():
        # torch warns of a use of its own within init_rpc.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
        _connect_to_all(topology, timeout_seconds)


def _connect_to_all(topology: Topology, timeout_seconds: float) -> None:
    """Return when every role is connected to every other, and to itself: nobody needs to be let in later."""
    for greeting in [_send(role, _greet, torch.zeros(1)) for role in topology.roles]:
        greeting.wait()
    rpc.api._all_gather(None, timeout=timeout_seconds)


def stop(timeout_seconds: float, graceful: bool = True) -> None:
    """Leave the RPC group.

    Args:
        timeout_seconds: how long to wait for the other roles.
        graceful: wait until every role leaves; False where one may be gone.
    """
    try:
        rpc.shutdown(graceful=graceful, timeout=timeout_seconds)
    finally:
        install(None)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a call raised on the process where it ran."""

    message: str
    kind: str  # name of its class
    is_users: bool
    host: str
    stack: str


class RemoteError(ClusterError):
    """A role answered a call with an exception of its own."""

    def __init__(self, role: Role, failure: Failure) -> None:
        where = f"{role} on {failure.host}: "
        super().__init__(failure.message if failure.is_users else where + failure.message)
        self.role = role
        self.failure = failure


class LostError(ClusterError):
    """A role did not answer: it is gone, frozen, or out of reach."""

    def __init__(self, role: Role, cause: str) -> None:
        super().__init__(f"{role} does not answer ({cause})")
        self.role = role


class RefusedError(ClusterError):
    """A call or its answer was refused: it was not signed for its receiver, or holds what may not travel."""

    def __init__(self, role: Role, error: Exception) -> None:
        reason = str(error).partition(REFUSED)[2].splitlines()[0]
        super().__init__(f"a call to {role} failed: {REFUSED}{reason}")
        self.role = role


class Pending:
    """A call under way."""

    def __init__(self, role: Role, future: torch.futures.Future[Any]) -> None:
        self.role = role
        self._future = future
        self._done = done = threading.Event()
        # The callback must not hold self: through the C++ future that is a cycle no collector sees.
        future.add_done_callback(lambda _: done.set())

    def done(self, wait_seconds: float = 0.0) -> bool:
        """Whether the answer has come; waits up to ``wait_seconds`` for it, open to signals."""
        # Where memory has run out, the callback may have failed.
        return self._done.wait(wait_seconds) or self._future.done()

    def wait(self) -> Any:
        """The answer.

        Raises:
            RemoteError: the call raised an exception.
            RuntimeError: what the answer waited for has failed; :func:`_failure` makes it readable.
            RefusedError: the role refused the call, or this process its answer.
            LostError: no answer came within the call's timeout, or the connection broke.
        """
        while not self.done(_DONE_SECONDS):  # open to signals; every call has a timeout
            pass
        try:
            value = self._future.wait()
        except RuntimeError as error:
            if RAISED_LATER in str(error):  # it did answer, with an exception
                raise
            if REFUSED in str(error):
                raise RefusedError(self.role, error) from error
            raise LostError(self.role, first_line(error)) from error
        if isinstance(value, Failure):
            raise RemoteError(self.role, value)
        return value


def _send(
    role: Role,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = rpc.constants.UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    with addressed_to(role.rpc_name):
        future: torch.futures.Future[Any] = rpc.rpc_async(
            role.rpc_name, function, args=args, timeout=timeout_seconds
        )
    return future


class Remote(Generic[Owned]):
    """A stub of an object that lives on another process."""

    def __init__(self, role: Role, rref: rpc.RRef[Any]) -> None:
        self.role = role
        self._rref = rref

    def call(self, method: str, *args: Any, timeout_seconds: float | None = None) -> Pending:
        """Start ``method(*args)`` on the object, where it lives.

        Functions among ``args`` travel by name, as :func:`hybrid.own_code.described` says.
        """
        timeout = rpc.constants.UNSET_RPC_TIMEOUT if timeout_seconds is None else timeout_seconds
        call = (self._rref, method, tuple(map(described, args)))
        return Pending(self.role, _send(self.role, _invoke, *call, timeout_seconds=timeout))

    def local_value(self) -> Owned:
        """The object itself, on the process that owns it."""
        return cast(Owned, self._rref.local_value())


class ModuleRef(NamedTuple):
    """A module on another process: the reference that keeps it, and its number there.

    Calls that come every step name it by number: a reference in a message takes half as much processor time
    as everything else about a small one.
    """

    rref: rpc.RRef[Any]
    number: int


class RemoteHost(Remote[Hosted]):
    """A stub of what a worker hosts and updates once a step."""

    def __init__(self, role: Role, module: ModuleRef) -> None:
        super().__init__(role, module.rref)
        self._number = module.number

    def ask_norm(self, step: int) -> Pending:
        """See :meth:`UpdateBarrier.norm`."""
        return Pending(self.role, _send(self.role, _norm, self._number, step))

    def send_decision(self, step: int, scale: float | None) -> Pending:
        """See :meth:`UpdateBarrier.decide`."""
        return self.call("decide", step, scale)

    def send_finish(self, trainer: int, step: int) -> Pending:
        """See :meth:`UpdateBarrier.finish`."""
        return self.call("finish", trainer, step)

    def send_rejoin(self, trainer: int, step: int) -> Pending:
        """See :meth:`UpdateBarrier.rejoin`."""
        return self.call("rejoin", trainer, step)


class RemoteTables(RemoteHost[TableShards]):
    """A stub of a worker's tables."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> torch.futures.Future[list[Tensor]]:
        """See :meth:`TableShards.lookup`; within a context, part of its graph."""
        return _send(self.role, _lookup, self._number, tuple(ticket), _plain(items))

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> torch.futures.Future[list[Tensor]]:
        """See :meth:`TableShards.exchange`."""
        sent = (self._number, tuple(ticket), list(grads), tuple(next_ticket), _plain(items))
        return _send(self.role, _exchange, *sent)

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Pending:
        """See :meth:`TableShards.receive`."""
        return self.call("receive", ticket, grads)


def _plain(items: Sequence[Item]) -> list[tuple[int, tuple[Any, ...]]]:
    return [(group, tuple(bags)) for group, bags in items]


class RemoteNet(RemoteHost[NetHost]):
    """A stub of a dense net that lives on a worker; calling it is part of the distributed autograd graph."""

    def __call__(self, ticket: Ticket, hidden_BH: Tensor) -> Tensor:
        """The remote net's output for ``hidden_BH``; see :meth:`NetHost.call`."""
        output: Tensor = _send(self.role, _call_net, self._number, tuple(ticket), hidden_BH).wait()
        return output


def create(role: Role, cls: type[Owned], *args: Any, timeout_seconds: float) -> Pending:
    """Start constructing ``cls(*args)`` on ``role``; the answer is its :class:`Remote`.

    Args:
        cls: one that :func:`hybrid.trust.allowed.hosted` finds by its name.
    """
    sent = tuple(map(described, args))
    return Pending(role, _send(role, _construct, role, name_of(cls), sent, timeout_seconds=timeout_seconds))


def create_module(role: Role, cls: type[nn.Module], *args: Any) -> ModuleRef:
    """Construct a module on ``role`` as a ``RemoteModule``; returns once it is there.

    Args:
        cls: one that :func:`hybrid.trust.allowed.hosted` finds by its name.

    Raises:
        RemoteError: its constructor raised an exception.
        LostError: the role did not answer.
    """
    # It calls what it is given, and returns at once: what is raised there would show at the first use.
    sent = (name_of(cls), tuple(map(described, args)))
    with addressed_to(role.rpc_name):
        remote = RemoteModule(f"{role.rpc_name}/cpu", _construct_module, sent)  # type: ignore[arg-type]
    rref = remote.get_module_rref()
    number: int = Pending(role, _send(role, _await_module, rref)).wait()
    return ModuleRef(rref, number)


def ping(role: Role, timeout_seconds: float) -> Pending:
    """Ask ``role`` for a sign of life; the answer is its :class:`Vitals`."""
    return Pending(role, _send(role, _vitals, timeout_seconds=timeout_seconds))


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


def _greet(tensor: Tensor) -> Tensor:
    return tensor


def _vitals() -> Vitals:
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
def _lookup(
    number: int, ticket: tuple[Any, ...], items: list[tuple[int, Any]]
) -> torch.futures.Future[list[Tensor]]:
    tables: TableShards = _modules[number]
    return tables.lookup(Ticket(*ticket), items)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _exchange(
    number: int,
    ticket: tuple[Any, ...],
    grads: list[Tensor],
    next_ticket: tuple[Any, ...],
    items: list[tuple[int, Any]],
) -> torch.futures.Future[list[Tensor]]:
    tables: TableShards = _modules[number]
    try:
        answer = tables.exchange(Ticket(*ticket), grads, Ticket(*next_ticket), items)
    except Exception as error:  # comes back like an error of the answer
        answer = Answer()
        answer.set_exception(error)
    return answer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _call_net(number: int, ticket: tuple[Any, ...], hidden_BH: Tensor) -> torch.futures.Future[Tensor]:
    host: NetHost = _modules[number]
    return host.call(Ticket(*ticket), hidden_BH)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _norm(number: int, step: int) -> torch.futures.Future[float]:
    host: Host = _modules[number]
    return host.norm(step)


def _construct(role: Role, cls: str, args: tuple[Any, ...]) -> Any:
    try:
        return Remote(role, rpc.RRef(hosted(cls)(*map(resolved, args))))
    except Exception as error:  # comes back as a value
        return _failure(error)


class _Unbuilt(nn.Module):
    """In the place of a module whose constructor has failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


def _construct_module(cls: str, args: tuple[Any, ...]) -> nn.Module:
    try:
        module: nn.Module = hosted(cls)(*map(resolved, args))
        return module
    except Exception as error:  # comes back as a value
        return _Unbuilt(_failure(error))


def _await_module(rref: rpc.RRef[nn.Module]) -> Failure | int:
    module = rref.local_value()
    if isinstance(module, _Unbuilt):
        return module.failure
    number = next(_module_numbers)
    _modules[number] = module
    return number


def _invoke(rref: rpc.RRef[Any], method: str, args: tuple[Any, ...]) -> Any:
    try:
        return getattr(rref.local_value(), method)(*map(resolved, args))
    except Exception as error:  # comes back as a value
        return _failure(error)


def _failure(error: Exception) -> Failure:
    kind, users = type(error).__name__, isinstance(error, HybridError)
    message = str(error) if users else f"{type(error).__name__}: {first_line(error)}"
    if RAISED_LATER in message:
        # What went wrong while a worker prepared an answer says so itself, after the name of its class.
        message = message.rpartition(RAISED_LATER)[2]
        kind, _, told = message.partition(": ")
        if isinstance(named := getattr(errors, kind, None), type) and issubclass(named, HybridError):
            message, users = told, True
    return Failure(message, kind, users, socket.gethostname(), traceback.format_exc())


_CALLS = (
    _greet,
    _vitals,
    _lookup,
    _exchange,
    _call_net,
    _norm,
    _construct,
    _await_module,
    _invoke,
)
