"""Stubs of objects that live on other processes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.futures import Future

from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.bags import Item, pack_items
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.primitives.deferred_response import ObservableResult
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.security.signed_pickler import addressed_to
from hybrid.server.barrier import UpdateBarrier
from hybrid.server.hosted_module import Hosted
from hybrid.topology import Role
from hybrid.transport.rpc import endpoints
from hybrid.transport.rpc.pending_calls import Pending, PendingTensors
from hybrid.transport.socket.socket_client import CLIENTS
from hybrid.user_code.function_names import qualified_name, to_reference

Owned = TypeVar("Owned", covariant=True)
Kind = TypeVar("Kind", bound=Hosted, covariant=True)
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


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

    def call(
        self,
        method: Callable[[Owned, *Arguments], Result],
        *args: *Arguments,
        timeout_seconds: float = rpc.constants.UNSET_RPC_TIMEOUT,
    ) -> Pending[Result]:
        """Start a method of the object.

        Functions among the arguments are sent by name, as :func:`to_reference` says.

        Args:
            method: of the object's class.
        """
        sent = (self._rref, method.__name__, tuple(map(to_reference, args)))
        return Pending(self.role, _send(self.role, endpoints.invoke, *sent, timeout_seconds=timeout_seconds))

    def local_value(self) -> Owned:
        """The object itself, on the process that owns it."""
        return cast(Owned, self._rref.local_value())


class ModuleRef(NamedTuple):
    """A module on another process: the reference that keeps it alive, and its number there.

    The calls of a step name it by number: a reference in a small message would cost half as much as the rest.
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
        """The module."""
        return ModuleRef(self._rref, self._number)

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> Pending[Result]:
        """Start a method of the module's update barrier; see :meth:`call`."""
        return Pending(self.role, _send(self.role, endpoints.invoke, self._number, method.__name__, args))

    def norm(self, step: int) -> Pending[float]:
        """See :meth:`UpdateBarrier.norm`."""
        return Pending(self.role, _send(self.role, endpoints.norm, self._number, step))


class RemoteTables(RemoteHosted[TableShards]):
    """A stub of a worker's tables."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> PendingTensors[list[Tensor]]:
        """See :meth:`TableShards.lookup`; part of the graph of distributed autograd in its contexts."""
        if ticket.purpose is Purpose.PREFETCH:
            return self._exchange(next_ticket=ticket, items=items)
        plain, tensors = pack_items(items)
        request = self._number, ticket.plain, plain
        if ticket.purpose is Purpose.TRAIN:
            return PendingTensors(self.role, _send(self.role, endpoints.lookup, request, tensors))
        return PendingTensors(self.role, CLIENTS[self.role].call(endpoints.lookup, request, tensors))

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> PendingTensors[list[Tensor]]:
        """See :meth:`TableShards.receive`; the response is empty."""
        return self._exchange(ticket, grads)

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> PendingTensors[list[Tensor]]:
        """Send gradients and look up, in one message."""
        return self._exchange(ticket, grads, next_ticket, items)

    def skip(self) -> ObservableResult[list[Tensor]]:
        """See :meth:`TableSource.skip`."""
        nothing: Future[list[Tensor]] = Future()
        nothing.set_result([])
        return nothing

    def _exchange(
        self,
        ticket: Ticket | None = None,
        grads: Sequence[Tensor] = (),
        next_ticket: Ticket | None = None,
        items: Sequence[Item] = (),
    ) -> PendingTensors[list[Tensor]]:
        plain, tensors = pack_items(items)
        segment = ticket and ticket.plain, len(grads), next_ticket and next_ticket.plain, plain
        return PendingTensors(self.role, self._send_segment(segment, [*grads, *tensors]))

    def send_segments(
        self, segments: Sequence[endpoints.PlainSegment], tensors: Sequence[Tensor]
    ) -> ObservableResult[Any]:
        """Call :func:`endpoints.exchange`; :func:`raise_unanswered` interprets its errors.

        The memory of ``tensors`` may be written again once this returns.
        """
        return CLIENTS[self.role].call(endpoints.exchange, (self._number, segments), tensors)

    def _send_segment(
        self, segment: endpoints.PlainSegment, tensors: Sequence[Tensor]
    ) -> ObservableResult[Any]:
        return self.send_segments([segment], tensors)


class RemoteNet(RemoteHosted[HostedNet]):
    """A stub of a dense net on a worker; a call is part of the graph of distributed autograd."""

    def __call__(self, ticket: Ticket, hidden_BH: Tensor) -> Tensor:
        """Return the remote net's output for ``hidden_BH``; see :meth:`HostedNet.call`."""
        sent = (self._number, ticket.plain, hidden_BH)
        output: PendingTensors[Tensor] = PendingTensors(
            self.role, _send(self.role, endpoints.call_net, *sent)
        )
        return output.wait()


def create(
    role: Role, cls: Callable[[*Arguments], Owned], *args: *Arguments, timeout_seconds: float
) -> Pending[Remote[Owned]]:
    """Start constructing ``cls(*args)`` on ``role``; the response is a stub of it.

    Args:
        cls: a class of this project, or of the user's modules.
    """
    sent = (qualified_name(cls), tuple(map(to_reference, args)))
    return Pending(
        role, _send(role, endpoints.create, *sent, timeout_seconds=timeout_seconds), partial(Remote, role)
    )


def create_module(role: Role, cls: Callable[[*Arguments], nn.Module], *args: *Arguments) -> ModuleRef:
    """Construct a module on ``role`` as a ``RemoteModule``; return once it is constructed.

    Args:
        cls: as for :func:`create`.

    Raises:
        RemoteError: its constructor raised an exception.
        LostError: the role did not answer.
    """
    # RemoteModule returns at once, and would report an exception of the constructor at the first use.
    sent = (qualified_name(cls), tuple(map(to_reference, args)))
    with addressed_to(role.rpc_name):
        remote = RemoteModule(f"{role.rpc_name}/cpu", endpoints.create_module, sent)  # type: ignore[arg-type]
    rref = remote.get_module_rref()
    number = Pending[int](role, _send(role, endpoints.await_module, rref)).wait()
    return ModuleRef(rref, number)


def greet(role: Role) -> Pending[Tensor]:
    """Connect this process and ``role``."""
    return Pending(role, _send(role, endpoints.greet, torch.zeros(1)))


def ping(role: Role, timeout_seconds: float) -> Pending[endpoints.Vitals]:
    """Request the state of ``role``."""
    return Pending(role, _send(role, endpoints.vitals, timeout_seconds=timeout_seconds))
