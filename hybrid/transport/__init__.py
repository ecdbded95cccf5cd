"""Everything that crosses process borders. Nothing else touches ``torch.distributed.rpc``.

::

    caller                                              owner
    ──────                                              ─────
    Remote.call, RemoteTables.lookup, create (stubs)
       │ a function of calls.CALLS, its arguments ──►  the function (calls) finds the object, runs a method
       ▼                                                │
    Pending.wait: the value, or RemoteError        ◄── a value, tensors, or a Failure (failure)

A call runs a method of an object on the process that owns it; what it returns or raises comes back as a
value (:class:`Failure`), because RPC keeps the type of three kinds of exception only. Lookups are the
exception: they take part in distributed autograd, so their answer must be bare tensors. Those that take no
part, and the gradients that belong to them, go by ``carrier`` instead; nobody above ``Pending`` knows. The
trainers of a host may send these together (``combining``), through memory that they share.

Begin with ``stubs``, which the master and trainers call. Calls and answers are signed, and only the
functions of ``calls.CALLS`` can be called (``security``), with ``payloads`` that only hold data; a role
joins and leaves with ``start`` and ``stop`` (``membership``).
"""

from hybrid.transport.rpc.call_failure import Failure, LostError, RefusedError, RemoteError
from hybrid.transport.rpc.endpoints import Vitals
from hybrid.transport.rpc.pending_calls import Pending, gather
from hybrid.transport.rpc.rpc_group import start, stop
from hybrid.transport.rpc.stubs import (
    ModuleRef,
    Remote,
    RemoteHosted,
    RemoteNet,
    RemoteTables,
    create,
    create_module,
    ping,
)

__all__ = [
    "Failure",
    "LostError",
    "ModuleRef",
    "Pending",
    "RefusedError",
    "Remote",
    "RemoteError",
    "RemoteHosted",
    "RemoteNet",
    "RemoteTables",
    "Vitals",
    "create",
    "create_module",
    "gather",
    "ping",
    "start",
    "stop",
]
