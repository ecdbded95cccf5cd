"""Everything that crosses process borders.

::

    caller                                           owner
    ──────                                           ─────
    a stub: Remote, RemoteTables, RemoteNet           the object
       │                                               ▲
       │ RPC: control, and what is part of             │ rpc/endpoints.py: the functions that can be called
       │ distributed autograd                          │
       ├──────────── torch.distributed.rpc ───────────►┤
       │ sockets: lookups and gradients outside        │
       │ of distributed autograd                       │
       ├── encrypted frames, blocks of memory ────────►┤
       ▼                                               │
    Pending.wait: the value, or an error ◄─────────────┘ a value, tensors, or a Failure

A call executes a method of an object on the process that owns it. RPC keeps the type of three kinds of
exceptions only, so an exception comes back as a value (:class:`Failure`). RPC costs two to four times as much
processor time per message as a socket, and does not encrypt, so it carries only what needs it: ``sync`` mode,
remote nets, and control. Calls and responses by RPC are signed (``hybrid.security``).

- ``rpc``: start with ``stubs``, which the master and the trainers call.
- ``socket``: one connection for each pair of a trainer and a worker; start with ``socket_client``.
- ``shared_memory``: within a host, large tensors are copied once into memory that both ends have
  (``lent_blocks``), and trainers aggregate their requests (``host_aggregation``).
"""

from hybrid.transport.rpc.endpoints import Vitals
from hybrid.transport.rpc.pending_calls import (
    Failure,
    LostError,
    Pending,
    RejectedCallError,
    RemoteError,
    gather,
)
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
    "RejectedCallError",
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
