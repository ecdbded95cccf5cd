"""What carries lookups and gradients outside of autograd: one sealed connection for a trainer and a worker.

::

    trainer                                          worker
    ───────                                          ──────
    Link.call (link) ── function, arguments ──►      Server (server): the function answers, now or later
       ▼                                               │
    Reply.wait, which reads  ◄── value, or error ──────┘

RPC encrypts nothing, and takes two to four times as much processor time for a message. Here tensors are
sealed from where they lie, and opened where they will lie (``frames``), and nobody is woken to hand them on:
whoever waits reads. RPC remains for what takes part in distributed autograd, and for control.

``meeting`` connects the two, and by ``introduction`` each proves to the other that it is that role of this
run. Within a host, large tensors lie in memory that both have (``host_memory``). Begin with ``link``.
"""
