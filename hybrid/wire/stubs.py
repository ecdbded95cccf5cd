"""What callers hold of objects that live on other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule

from hybrid.dense.remote import HostedNet
from hybrid.embedding.bags import Item
from hybrid.embedding.trainer.lookup import PendingTensors
from hybrid.embedding.worker.shards import TableShards
from hybrid.hosting.hosted import Hosted
from hybrid.own_code.names import described, name_of
from hybrid.steps.ticket import Ticket
from hybrid.topology import Role
from hybrid.trust.pickler import addressed_to
from hybrid.wire import calls
from hybrid.wire.failure import Failure, RemoteError, raise_unanswered

Owned = TypeVar("Owned")
Kind = TypeVar("Kind", bound=Hosted)

_DONE_SECONDS = 1.0
_POLL_SECONDS = 0.02


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
            RuntimeError, RefusedError, LostError: see :func:`raise_unanswered`.
        """
        while not self.done(_DONE_SECONDS):  # open to signals; every call has a timeout
            pass
        try:
            value = self._future.wait()
        except RuntimeError as error:
            raise_unanswered(self.role, error)
        if isinstance(value, Failure):
            raise RemoteError(self.role, value)
        return value


def gather(calls: Sequence[Pending], meanwhile: Callable[[], object] = lambda: None) -> list[Any]:
    """The answers of calls under way, in their order; the first failure, whichever call has it.

    Args:
        meanwhile: called every now and then.

    Raises:
        RemoteError, RuntimeError, RefusedError, LostError: as :meth:`Pending.wait`.
    """
    waiting = list(calls)
    while waiting:
        waiting[0].done(_POLL_SECONDS)
        meanwhile()
        for call in [c for c in waiting if c.done()]:
            call.wait()
            waiting.remove(call)
    return [call.wait() for call in calls]


class _PendingRemote(Pending):
    """An object that is being constructed."""

    def wait(self) -> Remote[Any]:
        return Remote(self.role, super().wait())


class _PendingTensors:
    """Tensors that a role is to answer with. There are several of these in a step, so it does little."""

    __slots__ = ("_future", "_role")

    def __init__(self, role: Role, future: torch.futures.Future[Any]) -> None:
        self._role = role
        self._future = future

    def wait(self) -> Any:
        """The tensors; for what it raises, see :func:`raise_unanswered`."""
        try:
            return self._future.wait()
        except RuntimeError as error:
            raise_unanswered(self._role, error)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See torch's futures."""
        self._future.add_done_callback(callback)


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

        Functions among ``args`` travel by name, as :func:`hybrid.own_code.names.described` says.
        """
        timeout = rpc.constants.UNSET_RPC_TIMEOUT if timeout_seconds is None else timeout_seconds
        call = (self._rref, method, tuple(map(described, args)))
        return Pending(self.role, _send(self.role, calls.invoke, *call, timeout_seconds=timeout))

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


class RemoteHosted(Remote[Kind]):
    """A stub of what a worker hosts and updates once a step."""

    def __init__(self, role: Role, module: ModuleRef) -> None:
        super().__init__(role, module.rref)
        self._number = module.number

    def __reduce__(self) -> tuple[type[Any], tuple[Role, ModuleRef]]:
        """A stub travels as the arguments of its constructor: a pickle sets no state where it arrives."""
        return type(self), (self.role, ModuleRef(self._rref, self._number))

    def ask_norm(self, step: int) -> Pending:
        """See :meth:`UpdateBarrier.norm`."""
        return Pending(self.role, _send(self.role, calls.norm, self._number, step))

    def send_decision(self, step: int, scale: float | None) -> Pending:
        """See :meth:`UpdateBarrier.decide`."""
        return self.call("decide", step, scale)

    def send_finish(self, trainer: int, step: int) -> Pending:
        """See :meth:`UpdateBarrier.finish`."""
        return self.call("finish", trainer, step)

    def send_rejoin(self, trainer: int, step: int) -> Pending:
        """See :meth:`UpdateBarrier.rejoin`."""
        return self.call("rejoin", trainer, step)


class RemoteTables(RemoteHosted[TableShards]):
    """A stub of a worker's tables."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> PendingTensors:
        """See :meth:`TableShards.lookup`; within a context, part of its graph."""
        sent = (self._number, tuple(ticket), _plain(items))
        return _PendingTensors(self.role, _send(self.role, calls.lookup, *sent))

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> PendingTensors:
        """See :meth:`TableShards.exchange`."""
        sent = (self._number, tuple(ticket), list(grads), tuple(next_ticket), _plain(items))
        return _PendingTensors(self.role, _send(self.role, calls.exchange, *sent))

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Pending:
        """See :meth:`TableShards.receive`."""
        return self.call("receive", ticket, grads)


def _plain(items: Sequence[Item]) -> list[tuple[int, tuple[Any, ...]]]:
    return [(group, tuple(bags)) for group, bags in items]


class RemoteNet(RemoteHosted[HostedNet]):
    """A stub of a dense net that lives on a worker; calling it is part of the distributed autograd graph."""

    def __call__(self, ticket: Ticket, hidden_BH: Tensor) -> Tensor:
        """The remote net's output for ``hidden_BH``; see :meth:`HostedNet.call`."""
        sent = (self._number, tuple(ticket), hidden_BH)
        output: Tensor = _PendingTensors(self.role, _send(self.role, calls.call_net, *sent)).wait()
        return output


def create(role: Role, cls: type[Owned], *args: Any, timeout_seconds: float) -> Pending:
    """Start constructing ``cls(*args)`` on ``role``; the answer is its :class:`Remote`.

    Args:
        cls: one that :func:`hybrid.trust.allowed.hosted` finds by its name.
    """
    sent = (name_of(cls), tuple(map(described, args)))
    return _PendingRemote(role, _send(role, calls.construct, *sent, timeout_seconds=timeout_seconds))


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
        remote = RemoteModule(f"{role.rpc_name}/cpu", calls.construct_module, sent)  # type: ignore[arg-type]
    rref = remote.get_module_rref()
    number: int = Pending(role, _send(role, calls.await_module, rref)).wait()
    return ModuleRef(rref, number)


def greet(role: Role) -> Pending:
    """Have this process and ``role`` connect to each other."""
    return Pending(role, _send(role, calls.greet, torch.zeros(1)))


def ping(role: Role, timeout_seconds: float) -> Pending:
    """Ask ``role`` for a sign of life; the answer is its :class:`Vitals`."""
    return Pending(role, _send(role, calls.vitals, timeout_seconds=timeout_seconds))
