"""What callers hold of objects that live on other processes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.futures import Future

from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.bags import Item, taken_apart
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.primitives.deferred_response import Watched
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.security.signed_pickler import addressed_to
from hybrid.server.barrier import UpdateBarrier
from hybrid.server.hosted_module import Hosted
from hybrid.topology import Role
from hybrid.transport.rpc import endpoints
from hybrid.transport.rpc.pending_calls import Pending, PendingTensors
from hybrid.transport.socket.socket_client import LINKS
from hybrid.transport.socket.socket_server import Carried
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


def _carry(role: Role, function: Carried, plain: Any, tensors: Sequence[Tensor]) -> Watched[Any]:
    """Call one of :data:`endpoints.SOCKET_CALLS`.

    The memory of ``tensors`` may be written again once this returns.
    """
    return LINKS[role].call(function, plain, tensors)


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
        """Start a method of the object, where it lives.

        Functions among the arguments travel by name, as :func:`described` says.

        Args:
            method: of the object's class, which names it.
        """
        sent = (self._rref, method.__name__, tuple(map(to_reference, args)))
        return Pending(self.role, _send(self.role, endpoints.invoke, *sent, timeout_seconds=timeout_seconds))

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

    @property
    def module(self) -> ModuleRef:
        """Where it is."""
        return ModuleRef(self._rref, self._number)

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> Pending[Result]:
        """Start a method of the object's update barrier; see :meth:`call`."""
        return Pending(
            self.role, _send(self.role, endpoints.invoke_barrier, self._number, method.__name__, args)
        )

    def norm(self, step: int) -> Pending[float]:
        """See :meth:`UpdateBarrier.norm`."""
        return Pending(self.role, _send(self.role, endpoints.norm, self._number, step))


class RemoteTables(RemoteHosted[TableShards]):
    """A stub of a worker's tables."""

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> PendingTensors[list[Tensor]]:
        """See :meth:`TableShards.lookup`; within a context, part of its graph."""
        if ticket.purpose is Purpose.PREFETCH:
            return self._exchange(next_ticket=ticket, items=items)
        plain, tensors = taken_apart(items)
        send = _send if ticket.purpose is Purpose.TRAIN else _carry
        asked = self._number, ticket.plain, plain
        return PendingTensors(self.role, send(self.role, endpoints.lookup, asked, tensors))

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> PendingTensors[list[Tensor]]:
        """See :meth:`TableShards.receive`; the answer is empty."""
        return self._exchange(ticket, grads)

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> PendingTensors[list[Tensor]]:
        """Send gradients and look up, in one message."""
        return self._exchange(ticket, grads, next_ticket, items)

    def skip(self) -> Watched[list[Tensor]]:
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
        plain, tensors = taken_apart(items)
        part = ticket and ticket.plain, len(grads), next_ticket and next_ticket.plain, plain
        return PendingTensors(self.role, self._carry_part(part, [*grads, *tensors]))

    def carry_parts(self, parts: Sequence[endpoints.PlainPart], tensors: Sequence[Tensor]) -> Watched[Any]:
        """Send :func:`calls.exchange`; what it comes to is for :func:`raise_unanswered`."""
        return _carry(self.role, endpoints.exchange, (self._number, parts), tensors)

    def _carry_part(self, part: endpoints.PlainPart, tensors: Sequence[Tensor]) -> Watched[Any]:
        return self.carry_parts([part], tensors)


class RemoteNet(RemoteHosted[HostedNet]):
    """A stub of a dense net that lives on a worker; calling it is part of the distributed autograd graph."""

    def __call__(self, ticket: Ticket, hidden_BH: Tensor) -> Tensor:
        """The remote net's output for ``hidden_BH``; see :meth:`HostedNet.call`."""
        sent = (self._number, ticket.plain, hidden_BH)
        output: PendingTensors[Tensor] = PendingTensors(
            self.role, _send(self.role, endpoints.call_net, *sent)
        )
        return output.wait()


def create(
    role: Role, cls: Callable[[*Arguments], Owned], *args: *Arguments, timeout_seconds: float
) -> Pending[Remote[Owned]]:
    """Start constructing ``cls(*args)`` on ``role``; the answer is a stub of it.

    Args:
        cls: one that ``role`` may be asked for (see :func:`start`), or of the user's own.
    """
    sent = (qualified_name(cls), tuple(map(to_reference, args)))
    return Pending(
        role, _send(role, endpoints.create, *sent, timeout_seconds=timeout_seconds), partial(Remote, role)
    )


def create_module(role: Role, cls: Callable[[*Arguments], nn.Module], *args: *Arguments) -> ModuleRef:
    """Construct a module on ``role`` as a ``RemoteModule``; returns once it is there.

    Args:
        cls: as for :func:`create`.

    Raises:
        RemoteError: its constructor raised an exception.
        LostError: the role did not answer.
    """
    # It calls what it is given, and returns at once: what is raised there would show at the first use.
    sent = (qualified_name(cls), tuple(map(to_reference, args)))
    with addressed_to(role.rpc_name):
        remote = RemoteModule(f"{role.rpc_name}/cpu", endpoints.create_module, sent)  # type: ignore[arg-type]
    rref = remote.get_module_rref()
    number = Pending[int](role, _send(role, endpoints.await_module, rref)).wait()
    return ModuleRef(rref, number)


def greet(role: Role) -> Pending[Tensor]:
    """Have this process and ``role`` connect to each other."""
    return Pending(role, _send(role, endpoints.greet, torch.zeros(1)))


def ping(role: Role, timeout_seconds: float) -> Pending[endpoints.Vitals]:
    """Ask ``role`` for a sign of life; the answer is what it says of itself."""
    return Pending(role, _send(role, endpoints.vitals, timeout_seconds=timeout_seconds))
