"""Protection against processes that do not have the cluster's secret.

Every key is derived from one :class:`~hybrid.security.secret.Secret`. A process that has the secret is
trusted as a member of the cluster. Other processes cannot run code, or change what is signed or encrypted::

    sender                                        receiver
    ──────                                        ────────
    call, arguments                               function, arguments
       │ pickle without tensors                      ▲ unpickle
       │ sign: sender, number, receiver              │ verify: signed for this process, not replayed
       ▼                                             │
       ─ torch's RPC authenticates no peer, so its ports are closed once the roles are connected ─

Two mechanisms cover the two transports:

- RPC: ``signed_pickler`` pickles a call or a response, and ``message_signature`` encrypts the pickle and
  signs the tensors. Nothing is unpickled before its signature is verified. Torch's own messages are not
  protected, but ``closed_listeners`` closes the ports on which torch listens.
- Sockets (rendezvous, and lookups and gradients of tables): ``secret.DirectionCipher`` encrypts each
  direction after a handshake. A message contains numbers, text and tensors; ``rejections.PlainUnpickler``
  rejects classes and functions.

A rejected message is counted, logged and not loaded (``rejections``).
"""
