"""Calls between processes, and the transports that carry them.

::

    caller                                           owner
    ──────                                           ─────
    a stub: Remote, RemoteTables, RemoteNet           the object
       │                                               ▲
       │ RPC: control, and calls within                │ endpoints.py: the functions that can be called
       │ distributed autograd                          │
       ├──────────── torch.distributed.rpc ───────────►┤
       │ sockets: lookups and gradients outside        │
       │ of distributed autograd                       │
       ├── encrypted frames, shared memory ───────────►┤
       ▼                                               │
    Pending.wait: the value, or an error ◄─────────────┘ a value, tensors, or a Failure

A call executes a method of an object on the process that owns the object. RPC preserves only three types of
exceptions. So control calls return exceptions as values (:class:`Failure`); other calls send the text of the
exception. RPC costs two to four times as much processor time per message as a socket, and does not encrypt.
So only ``sync`` mode, control, and dense nets on workers use RPC. Calls by RPC and responses are signed.

A process takes part in one cluster at a time. ``start`` creates all state of a cluster, ``stop`` releases it.

Start with ``stubs``, which the master and the trainers call. ``socket`` has the encrypted connections, one
for each pair of a trainer and a worker.

Within a host, large tensors are copied once, into memory that both processes map (``hybrid/shared_memory``).
"""

from hybrid.transport.endpoints import ProcessStatus as ProcessStatus
from hybrid.transport.pending_calls import (
    Failure as Failure,
    LostError as LostError,
    Pending as Pending,
    RemoteError as RemoteError,
    gather as gather,
)
from hybrid.transport.stubs import (
    Remote as Remote,
    RemoteHosted as RemoteHosted,
    RemoteNet as RemoteNet,
    RemoteTables as RemoteTables,
    create as create,
    create_module as create_module,
    ping as ping,
    start as start,
    stop as stop,
)
