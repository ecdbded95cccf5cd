"""Protection against processes that do not have the cluster's secret.

Every key is derived from one :class:`~hybrid.security.secret.Secret`. Whoever has it is a member of the
cluster, and trusted. Nobody else gets code run, reads a table or changes a message::

    sender                                        receiver
    ──────                                        ────────
    call, arguments                               function, arguments
       │ pickle, tensors beside it                   ▲ unpickle
       │ sign: sender, number, receiver              │ verify: signed for this process, and new
       ▼                                             │
       ───── torch's RPC, which accepts anybody: its ports are closed once the roles are connected ─────

Two mechanisms cover the two transports:

- RPC: ``message_signature`` signs what ``signed_pickler`` makes of a call or a response. Nothing is unpickled
  before its signature is verified. Torch's own messages bypass the pickler, so ``closed_listeners`` closes
  the ports on which torch listens.
- Sockets (rendezvous, lookups and gradients): after a handshake, ``sealed_stream`` encrypts each direction. A
  message holds numbers, text and tensors; ``rejected_messages.PlainUnpickler`` rejects every name.

A rejected message is counted and logged, and never loaded (``rejected_messages``).
"""
